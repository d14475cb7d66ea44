"""Infrastructure shared by all CPU kernels: Numba compilation, vector instructions, the thread pool, launch replay."""
