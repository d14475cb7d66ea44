"""ModelOpt: NVFP4, MXFP4 and FP8, see their files; described by quantization_config or hf_quant_config.json.

weight          NVFP4, MXFP4: uint8 [N, K/2]; FP8: float8_e4m3fn [N, K]; fused experts have a leading dimension E
weight_scale    NVFP4: float8_e4m3fn [N, K/16]; MXFP4: uint8 [N, K/32]; FP8: [], [N], or per block [N/128, 1, K/128, 1]
weight_scale_2  NVFP4: [], or [E]: factor of the scales

The format is inferred from a weight's tensors, so neither `exclude_modules` nor `quantized_layers` is needed. Quantization of
activations (`input_scale`) and of the KV cache (`k_scale`, `v_scale`) is not supported.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.weights.fields import NAME, Fields
from auraflux.weights.formats.methods import fp8, mxfp4, nvfp4
from auraflux.weights.formats.methods.method import GROUP_SIZE, Header, StoredFormat
from auraflux.weights.formats.stored import Stored
from auraflux.weights.formats.untrusted import shown

PURE = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ")
ALGORITHMS = (*PURE, "MXFP4", "W4A8_MXFP4_FP8", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MIXED_PRECISION")
NAMES = nvfp4.Names("weight", "weight_scale", "weight_scale_2")
BLOCKS = fp8.Blocks(((128, 128),), False)
PRE_SCALE = "pre_quant_scale"


@dataclass(frozen=True)
class ModelOpt:
    """ModelOpt folder.

    cache  KV cache quantization algorithm, if any
    """

    cache: str | None
    title: ClassVar[str] = "ModelOpt"
    parts: ClassVar[tuple[str, ...]] = (*NAMES, PRE_SCALE)
    unused: ClassVar[tuple[str, ...]] = ("input_scale", "output_scale", "k_scale", "v_scale")

    def claims(self, found: Iterable[str]) -> bool:
        return "weight" in found and "weight_scale" in found

    def plan(self, headers: Mapping[str, Header], read: Callable[[str], Tensor]) -> StoredFormat:
        if PRE_SCALE in headers:
            raise FormatError(f"its inputs are scaled by a {PRE_SCALE}, which is not supported. Use a model without AWQ.")
        scales = headers["weight_scale"]
        if headers["weight"].dtype == nvfp4.OCTETS and scales.dtype in mxfp4.EXPONENTS:
            return mxfp4.plan(headers, NAMES.codes, NAMES.scales, (nvfp4.OCTETS,))
        if headers["weight"].dtype == nvfp4.OCTETS:
            return nvfp4.plan(headers, NAMES)
        return fp8.plan({**headers, "weight_scale": scales._replace(shape=_flat(scales.shape))}, "weight_scale", BLOCKS)

    def load(self, parts: Mapping[str, Tensor]) -> Stored:
        codes, scales = parts["weight"], parts["weight_scale"]
        if not codes.is_floating_point() and scales.dtype is not torch.float8_e4m3fn:
            return mxfp4.load(codes, scales)
        if not codes.is_floating_point():
            return nvfp4.load(codes, scales, parts["weight_scale_2"])
        return fp8.load(codes, scales.view(_flat(tuple(scales.shape))), BLOCKS)

    def notes(self) -> list[str]:
        activations = ["Activations are not quantized, regardless of the config."]
        cache = [f"The KV cache is not quantized to {self.cache} as in the config; set its format with --kv."]
        return [*activations, *(cache if self.cache else [])]


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of per-block scales without their unit dimensions."""
    return (shape[0], shape[2]) if len(shape) == 4 and shape[1] == shape[3] == 1 else shape


def open_method(config: Fields) -> ModelOpt:
    """Read `quantization_config`, or `quantization` of hf_quant_config.json."""
    algorithm, group = config.get("quant_algo", NAME, None), config.get("group_size", GROUP_SIZE, None)
    if str(algorithm).upper() not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        raise FormatError(f"ModelOpt with quant_algo {shown(algorithm)} is not supported. Supported: {known}.")
    if str(algorithm).upper() in PURE and group not in (None, nvfp4.GROUP):
        raise FormatError(f"NVFP4 in groups of {shown(group)} is not supported, only groups of {nvfp4.GROUP}.")
    return ModelOpt(config.get("kv_cache_quant_algo", NAME, None))
