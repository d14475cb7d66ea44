"""Weight formats: MLX affine at 2 to 8 bits, and MXFP4."""

from auraflux.quant.qtensor import QTensor, check_format, quantize

__all__ = ["QTensor", "check_format", "quantize"]
