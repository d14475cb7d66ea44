"""Timing on a GPU: shapes of real models, CUDA graphs, the ceilings of the same run and other libraries beside."""
