"""Prefill attention over the quantized KV cache on CUDA."""
