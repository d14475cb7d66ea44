"""Products of several tokens with weights on CUDA: skinny GEMMs on codes, wgmma tiles, clusters."""
