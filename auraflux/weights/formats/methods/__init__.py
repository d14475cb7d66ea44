"""Quantization methods of Hugging Face folders, selected by `quantization_config`."""

from collections.abc import Callable

from auraflux.errors import FormatError
from auraflux.weights.fields import NAME, Fields
from auraflux.weights.formats.methods import awq, compressed_tensors, fp8, gptq, modelopt
from auraflux.weights.formats.methods.method import Header, Method, StoredFormat
from auraflux.weights.formats.untrusted import shown

METHODS: dict[str, Callable[[Fields], Method]] = {
    "awq": awq.open_method,
    "gptq": gptq.open_method,
    "compressed-tensors": compressed_tensors.open_method,
    "fp8": fp8.open_method,
    "fbgemm_fp8": fp8.open_method,
    "modelopt": modelopt.open_method,
}
# handled by `Folder` itself: gpt-oss's MXFP4 blocks, recognized by tensor names
BUILT_IN = ("mxfp4",)
# layouts of one library's own kernels
FOREIGN = {"hqq": "HQQ", "exl2": "EXL2", "exl3": "EXL3"}
INSTEAD = "a bf16 or MLX folder, or a GGUF file of the model."

__all__ = ["Header", "Method", "StoredFormat", "method_of"]


def method_of(config: Fields, modelopt: Fields | None = None) -> Method | None:
    """Return the quantization method that a config.json names; None if weights are dense or MLX's.

    modelopt  contents of hf_quant_config.json, used if config.json names no method
    """
    places = [config.section("quantization_config"), config.section("compression_config")]
    places += [config.section("text_config").section("quantization_config")]
    found = next((place for place in places if place), modelopt) or places[0]
    name = found.get("quant_method", NAME, None) or ("modelopt" if "quant_algo" in found else None)
    if config.section("quantization") or name is None or name in BUILT_IN:
        return None
    if name in FOREIGN:
        raise FormatError(
            f"the weights are in {FOREIGN[name]}'s own layout, which is not read: take the model's bf16 folder, which "
            "auraflux convert quantizes to 2 to 8 bits, or a GGUF file of it."
        )
    if name not in METHODS:
        known = ", ".join([*METHODS, *BUILT_IN])
        raise FormatError(
            f"the weights are quantized by {shown(name)}, which is not supported. Supported: {known}. "
            f"Use such a folder, {INSTEAD}"
        )
    try:
        return METHODS[name](found)
    except FormatError as err:
        raise FormatError(f"{err} Or use {INSTEAD}") from err
