"""Rough speeds of routes that multiply by a weight, for `auraflux inspect` to print before anything is measured."""

from typing import NamedTuple


class RouteSpeed(NamedTuple):
    """Speed to expect of a route.

    method   what it does with the weight, in a few words
    decode   speed for one token
    prefill  speed for many tokens; empty if the same as `decode`
    """

    method: str
    decode: str
    prefill: str = ""

    def at(self, tokens: int) -> str:
        """Return the speed for a number of tokens."""
        return self.prefill if self.prefill and tokens > 1 else self.decode


MATVEC = RouteSpeed("dequantized in registers", "near peak bandwidth")
MATVEC_SLOWER = RouteSpeed("dequantized in registers", "0.4 to 0.9 of peak bandwidth")
GEMM = RouteSpeed("tensor-core product of codes", "about as fast as dense bf16")
GEMM_TILED = RouteSpeed("dequantized tile by tile, then multiplied", "slower than dense bf16")
GEMM_INVARIANT = RouteSpeed("batch-invariant product of codes", "slower than dense bf16")
DEQUANTIZED = RouteSpeed("dequantized to memory, then a dense product", "a dense product's time plus the dequantization")
DENSE_MATVEC = RouteSpeed("dense, 16 or 32 bits per weight", "near peak bandwidth", "float32 products")
DENSE_GEMM = RouteSpeed("dense product", "as fast as cuBLAS")
INT8_ACTIVATIONS = RouteSpeed("dequantized in registers, int8 activations", "0.4 to 0.9 of peak bandwidth", "int8 products")
INT16_ACTIVATIONS = RouteSpeed("dequantized in registers, int16 activations", "0.4 to 0.9 of peak bandwidth", "int8 products")
HALF_ACTIVATIONS = RouteSpeed(
    "dequantized in registers, half-precision activations", "half of peak bandwidth", "half-precision products"
)
FLOAT32_ACTIVATIONS = RouteSpeed(
    "dequantized in registers, float32 activations", "0.4 to 0.8 of peak bandwidth", "float32 products"
)
