"""Decode attention over the quantized KV cache on Hopper."""
