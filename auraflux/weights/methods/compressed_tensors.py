"""compressed-tensors: whole numbers packed at 2 to 8 bits or as int8, FP8 (see `fp8`), MXFP4 and NVFP4 (see `nvfp4`).

weight_packed      int32 [N, K*bits/32]  codes plus half their range, a bit stream along the inputs
weight             int8 [N, K]           instead, in the format "int-quantized"
weight_scale       [N, K/G], [N, 1] or [1]
weight_zero_point  beside packed codes int32 [N*bits/32, K/G], packed along the outputs; else int8 like the scales
weight_shape       [2]                   N and K
weight_g_idx       int32 [K]             the group of each input, with actorder "group"
weight[n, k] = weight_scale[n, g] * (code[n, k] - weight_zero_point[n, g])

MXFP4 has weight_packed uint8 [N, K/2], the first of two inputs in the low nibble, and weight_scale uint8 [N, K/32], exponents.
NVFP4 has the same codes, weight_scale in e4m3 [N, K/16] and weight_global_scale [1], by which that is divided.

A weight's own tensors tell its bits and groups, so that the patterns by which a config picks layers are not needed. What the
config asks to do to activations is not done: they are not rounded.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant import QTensor, mxfp4
from auraflux.quant.grouped import from_codes, owners_of, unpacked
from auraflux.weights.boundary import shown
from auraflux.weights.methods import fp8, nvfp4
from auraflux.weights.methods.method import DTYPES, Header, Held, check_width, expect, group_count, held_codes, part
from auraflux.weights.stored import Stored

MXFP4, NVFP4 = "mxfp4-pack-quantized", "nvfp4-pack-quantized"
NAMES = nvfp4.Names("weight_packed", "weight_scale", "weight_global_scale")
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", MXFP4, NVFP4, "dense", "mixed-precision")
NOT_A_NUMBER = 255  # of MXFP4's exponents
ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")
WHOLE = ("I32", "I64")


@dataclass(frozen=True)
class CompressedTensors:
    """What the layers have, all of them together.

    bits, groups  of whole numbers
    blocks        of FP8
    activations   whether some are to be rounded
    """

    bits: frozenset[int]
    groups: frozenset[int]
    blocks: fp8.Blocks
    activations: bool
    title: ClassVar[str] = "compressed-tensors"
    parts: ClassVar[tuple[str, ...]] = (
        "weight_packed",
        "weight",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "weight_global_scale",
    )
    unused: ClassVar[tuple[str, ...]] = ACTIVATIONS

    def claims(self, found: Iterable[str]) -> bool:
        return "weight_packed" in found or ("weight" in found and "weight_scale" in found)

    def plan(self, headers: Mapping[str, Header], read: Callable[[str], Tensor]) -> Held:
        if "weight_packed" not in headers and headers["weight"].dtype == fp8.CODES:
            return fp8.plan(headers, "weight_scale", self.blocks)
        if "weight_packed" in headers and headers["weight_packed"].dtype == nvfp4.OCTETS:
            if "weight_zero_point" in headers:
                raise FormatError("its weight_zero_point goes with no four-bit floats.")
            return nvfp4.plan(headers, NAMES) if NAMES.factor in headers else _plan_mxfp4(headers)
        shape, bits = self._packed(headers, read) if "weight_packed" in headers else (part(headers, "weight", ("I8",)), 8)
        (rows, width), scales = shape, headers.get("weight_scale", Header((), ""))
        check_width(width)
        groups = 1 if len(scales.shape) < 2 else scales.shape[1]
        if scales.dtype not in DTYPES or scales.shape not in ((), (1,), (1, 1), (rows, groups)):
            raise FormatError(
                f"its weight_scale is {scales.dtype or 'not there'} of shape {shown(list(scales.shape))}; "
                f"a scale for each of its {rows} rows, or one for all, is needed."
            )
        group = self._group(width, groups)
        zeros = headers.get("weight_zero_point")
        if zeros is not None and zeros.dtype == "I32":
            expect(headers, "weight_zero_point", ("I32",), (-(-rows * bits // 32), groups))
        elif zeros is not None:
            expect(headers, "weight_zero_point", ("I8",), scales.shape)
        owners = owners_of(width, group)
        if "weight_g_idx" in headers:
            expect(headers, "weight_g_idx", WHOLE, (width,))
            owners = _owners(read("weight_g_idx"), groups, owners)
        return held_codes(self.title, (rows, width), bits, group, owners, scales.dtype, zeros is None)

    def _packed(self, headers: Mapping[str, Header], read: Callable[[str], Tensor]) -> tuple[tuple[int, ...], int]:
        rows, words = part(headers, "weight_packed", ("I32",))
        expect(headers, "weight_shape", WHOLE, (2,))
        shape = tuple(map(int, read("weight_shape")))
        return shape, self._bits(shape, rows, words)

    def _bits(self, shape: tuple[int, ...], rows: int, words: int) -> int:
        if shape[0] == rows and shape[1] > 0:
            for bits in sorted(self.bits):
                if -(-shape[1] * bits // 32) == words:
                    return bits
        raise FormatError(
            f"its weight_packed has shape {[rows, words]}, which is no {shown(list(shape))} of {sorted(self.bits)} bits, "
            "of which each 32 fill whole words."
        )

    def _group(self, width: int, groups: int) -> int:
        if groups == 1:
            return width
        for group in sorted(self.groups):
            if group_count(width, group) == groups:
                return group
        raise FormatError(f"its {width} inputs have {groups} scales; groups in config.json have {sorted(self.groups)} inputs.")

    def load(self, parts: Mapping[str, Tensor]) -> Stored:
        scales = parts["weight_scale"]
        if "weight" in parts and parts["weight"].is_floating_point():
            return fp8.load(parts["weight"], scales, self.blocks)
        if "weight_packed" in parts and parts["weight_packed"].dtype is torch.uint8:
            if NAMES.factor in parts:
                return nvfp4.load(parts["weight_packed"], scales, parts[NAMES.factor], divided=True)
            return _mxfp4(parts["weight_packed"], scales)
        if "weight_packed" in parts:
            packed, shape = parts["weight_packed"], tuple(map(int, parts["weight_shape"]))
            bits = self._bits(shape, *packed.shape)
        else:
            codes, shape, bits = parts["weight"], tuple(parts["weight"].shape), 8
            unsigned = codes.view(torch.uint8) ^ 128
            packed = torch.nn.functional.pad(unsigned, (0, -shape[1] % 4)).view(torch.int32)
        rows, width = shape
        scales = scales.view(1, 1).expand(rows, 1) if scales.numel() == 1 else scales
        groups = scales.shape[1]
        zeros = _zeros(parts.get("weight_zero_point"), bits, rows, groups)
        owners = owners_of(width, self._group(width, groups))
        if "weight_g_idx" in parts:
            owners = _owners(parts["weight_g_idx"], groups, owners)
        return from_codes(packed, scales, zeros, bits, owners, "weight_zero_point" not in parts)

    def notes(self) -> list[str]:
        return ["config.json asks for activations of fewer bits; they are not rounded to those."] if self.activations else []


def _plan_mxfp4(headers: Mapping[str, Header]) -> Held:
    rows, octets = part(headers, "weight_packed", ("U8",))
    width = 2 * octets
    check_width(width)
    if width % mxfp4.GROUP:
        raise FormatError(f"it has {width} inputs; MXFP4 has them in groups of {mxfp4.GROUP}.")
    expect(headers, "weight_scale", ("U8",), (rows, width // mxfp4.GROUP))
    return Held((rows, width), "MXFP4", 4.25, "kept to the bit: level * 2**exponent")


def _mxfp4(octets: Tensor, exponents: Tensor) -> QTensor:
    if bool((exponents == NOT_A_NUMBER).any()):
        raise FormatError("some of its scales are not numbers.")
    shape = len(octets), 2 * octets.shape[1]
    return QTensor(octets.contiguous().view(torch.int32), exponents.contiguous(), None, mxfp4.BITS, mxfp4.GROUP, shape)


def _zeros(found: Tensor | None, bits: int, rows: int, groups: int) -> Tensor:
    """Zeros [N, G] on the scale of the packed codes, which are never negative."""
    half = 2 ** (bits - 1)
    if found is None:
        return torch.tensor(half).expand(rows, groups)
    if found.dtype is torch.int32:
        return unpacked(found.t().contiguous(), bits, rows).t()
    return (found.to(torch.int16) + half).view(-1, groups).expand(rows, groups)


def _owners(found: Tensor, groups: int, usual: Tensor) -> Tensor:
    least, most = int(found.min()), int(found.max())
    # what was never set
    if least == most == -1:
        return usual
    if least < 0 or most >= groups:
        raise FormatError(f"its weight_g_idx has numbers from {least} to {most}; it has {groups} groups.")
    return found.to(torch.int64)


def open_method(config: dict[str, Any]) -> CompressedTensors:
    """Read `quantization_config`."""
    groups = [each for each in (config.get("config_groups") or {}).values() if isinstance(each, dict)]
    weights = [each["weights"] for each in groups if isinstance(each.get("weights"), dict)]
    if not weights:
        raise FormatError("compressed-tensors without weights in its config_groups is not read.")
    for layout in {str(each.get("format") or config.get("format") or FORMATS[0]) for each in groups}:
        if layout not in FORMATS:
            known = ", ".join(FORMATS)
            raise FormatError(f"compressed-tensors in format {shown(layout)} is not read. Formats that are: {known}.")
    for each in weights:
        kind, bits = each.get("type") or "int", each.get("num_bits") or 8
        if kind != "int" and (kind, bits) not in (("float", 8), ("float", 4)):
            raise FormatError(f"compressed-tensors with weights of type {shown(kind)} and {bits} bits is not read.")
    sizes = sorted({size for each in weights if (size := each.get("group_size") or 0) > 0})
    blocks = [tuple(each.get("block_structure") or ()) for each in weights]
    return CompressedTensors(
        frozenset(each.get("num_bits") or 8 for each in weights),
        frozenset(sizes),
        fp8.Blocks((*((block[0], block[1]) for block in blocks if len(block) == 2), *((1, size) for size in sizes)), False),
        any(each.get("input_activations") for each in groups),
    )
