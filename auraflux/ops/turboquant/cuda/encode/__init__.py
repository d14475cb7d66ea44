"""Encoding of new keys and values into the pages of the quantized KV cache on CUDA."""
