"""Compilation of CPU kernels: a Numba pipeline that compiles whole kernels, the JIT cache folder, ahead-of-time compilation."""
