"""The quantized KV cache in other libraries: `transformers` and `mlx`. Each module imports its library."""
