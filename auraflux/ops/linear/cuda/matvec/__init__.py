"""Products of one token with weights on CUDA, by weight format."""
