"""Checkpoint readers: safetensors folders, GGUF files, quantization methods."""
