"""Weights rearranged for the CPU kernels while they load: rows interleaved, blocks of GGUF files split.

The results are bit-identical to those of `quant`, whose torch and numpy code defines the layouts. All kernels work on vectors
of `ISA.lanes` 32-bit words, one of each row: rows are transposed first, and then their words need shifts and masks only.
"""
