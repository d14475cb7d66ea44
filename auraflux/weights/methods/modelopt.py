"""ModelOpt: NVFP4 (see `nvfp4`) and FP8 (see `fp8`), by a quantization_config or by a file hf_quant_config.json.

weight          uint8 [N, K/2] of NVFP4, float8_e4m3fn [N, K] of FP8; of fused experts with one dimension more
weight_scale    float8_e4m3fn [N, K/16]; of FP8 [], [N], or of its blocks [N/128, 1, K/128, 1]
weight_scale_2  of NVFP4 [], or [E]: what its scales are multiplied by

A weight's own tensors tell which of them it has, so that neither `exclude_modules` nor `quantized_layers` is needed. What the
config asks to do to activations (`input_scale`) and to the cache (`k_scale`, `v_scale`) is not done.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from auraflux.errors import FormatError
from auraflux.weights.boundary import shown
from auraflux.weights.methods import fp8, nvfp4
from auraflux.weights.methods.method import Header, Held
from auraflux.weights.stored import Stored

PURE = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ")
ALGORITHMS = (*PURE, "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MIXED_PRECISION")
NAMES = nvfp4.Names("weight", "weight_scale", "weight_scale_2")
BLOCKS = fp8.Blocks(((128, 128),), False)
BEFORE = "pre_quant_scale"


@dataclass(frozen=True)
class ModelOpt:
    """cache  the algorithm of keys and values, if any."""

    cache: str | None
    title: ClassVar[str] = "ModelOpt"
    parts: ClassVar[tuple[str, ...]] = (*NAMES, BEFORE)
    unused: ClassVar[tuple[str, ...]] = ("input_scale", "output_scale", "k_scale", "v_scale")

    def claims(self, found: Iterable[str]) -> bool:
        return "weight" in found and "weight_scale" in found

    def plan(self, headers: Mapping[str, Header], read: Callable[[str], Tensor]) -> Held:
        if BEFORE in headers:
            raise FormatError(f"its inputs are to be multiplied by a {BEFORE}, which is not done. Use a file without AWQ.")
        if headers["weight"].dtype == nvfp4.OCTETS:
            return nvfp4.plan(headers, NAMES)
        scales = headers["weight_scale"]
        return fp8.plan({**headers, "weight_scale": scales._replace(shape=_flat(scales.shape))}, "weight_scale", BLOCKS)

    def load(self, parts: Mapping[str, Tensor]) -> Stored:
        codes, scales = parts["weight"], parts["weight_scale"]
        if not codes.is_floating_point():
            return nvfp4.load(codes, scales, parts["weight_scale_2"])
        return fp8.load(codes, scales.view(_flat(tuple(scales.shape))), BLOCKS)

    def notes(self) -> list[str]:
        rounding = ["Activations are not rounded, whatever the config asks for."]
        cache = [f"Keys and values are not rounded to {self.cache}, as the config asks for; --kv says how they are held."]
        return [*rounding, *(cache if self.cache else [])]


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of scales of blocks without the inputs and outputs within each."""
    return (shape[0], shape[2]) if len(shape) == 4 and shape[1] == shape[3] == 1 else shape


def open_method(config: dict[str, Any]) -> ModelOpt:
    """Read `quantization_config`, or `quantization` of hf_quant_config.json."""
    algorithm = config.get("quant_algo")
    if str(algorithm).upper() not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        raise FormatError(f"ModelOpt with quant_algo {shown(algorithm)} is not read. Those that are: {known}.")
    if str(algorithm).upper() in PURE and config.get("group_size") not in (None, nvfp4.GROUP):
        raise FormatError(f"NVFP4 in groups of {shown(config['group_size'])} is not read; it has groups of {nvfp4.GROUP}.")
    return ModelOpt(config.get("kv_cache_quant_algo"))
