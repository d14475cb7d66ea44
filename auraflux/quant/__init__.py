"""Weight formats: MLX affine at 2 to 8 bits, MXFP4, NVFP4, FP8, and GGUF block formats."""

from auraflux.quant.qtensor import KINDS, QTensor, check_format, quantize, scale_count

__all__ = ["KINDS", "QTensor", "check_format", "quantize", "scale_count"]
