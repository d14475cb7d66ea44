"""Building blocks of Triton kernels that run on any GPU: codes, dot products, flash attention, RoPE, softmax."""
