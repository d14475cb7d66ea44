"""The runtime around the CUDA kernels of all families: device facts, launches, ahead-of-time compilation, streams."""
