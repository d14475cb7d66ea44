"""What the CUDA kernels of all families share: Triton, launches, and the instructions of Hopper."""
