"""What the CPU kernels of all families share: compiling with Numba, vector instructions, recorded steps."""
