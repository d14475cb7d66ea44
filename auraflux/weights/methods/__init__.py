"""The `quantization_config` of a Hugging Face folder: which tensors are one weight, and what it stands for."""

from collections.abc import Callable
from typing import Any

from auraflux.errors import FormatError
from auraflux.weights.boundary import shown
from auraflux.weights.methods import awq, compressed_tensors, fp8, gptq, modelopt
from auraflux.weights.methods.method import Header, Held, Method

METHODS: dict[str, Callable[[dict[str, Any]], Method]] = {
    "awq": awq.open_method,
    "gptq": gptq.open_method,
    "compressed-tensors": compressed_tensors.open_method,
    "fp8": fp8.open_method,
    "fbgemm_fp8": fp8.open_method,
    "modelopt": modelopt.open_method,
}
# what a folder reads without a method: gpt-oss's blocks, named by their tensors
OWN = ("mxfp4",)
INSTEAD = "a bf16 or MLX folder, or a GGUF file of the model."

__all__ = ["Header", "Held", "Method", "method_of"]


def method_of(config: dict[str, Any], beside: dict[str, Any] | None = None) -> Method | None:
    """The method that a config.json names; None where weights are dense or MLX's.

    beside  what ModelOpt says in a file of its own, where config.json does not say it
    """
    inner = config.get("text_config")
    within = inner.get("quantization_config") if isinstance(inner, dict) else None
    found = config.get("quantization_config") or config.get("compression_config") or within or beside or {}
    name = found.get("quant_method") or ("modelopt" if "quant_algo" in found else None)
    if config.get("quantization") or name is None or name in OWN:
        return None
    if name not in METHODS:
        known = ", ".join([*METHODS, *OWN])
        raise FormatError(
            f"the weights are quantized by {shown(name)}, which is not read. Methods that are: {known}. "
            f"Use such a folder, {INSTEAD}"
        )
    try:
        return METHODS[name](found)
    except FormatError as err:
        raise FormatError(f"{err} Or use {INSTEAD}") from err
