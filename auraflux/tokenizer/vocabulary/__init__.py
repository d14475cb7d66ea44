"""Vocabularies of GGUF files and of tiktoken, as tokenizers of the `tokenizers` package."""
