"""compressed-tensors: integers packed at 2 to 8 bits or as int8, FP8 (see `fp8`), MXFP4 and NVFP4 (see `nvfp4`).

weight_packed      int32 [N, K*bits/32]  codes plus half their range, bit-packed along the inputs
weight             int8 [N, K]           instead, in the format "int-quantized", of 4 or 8 bits
weight_scale       [N, K/G], [N, 1] or [1]
weight_zero_point  with packed codes int32 [N*bits/32, K/G], packed along the outputs; else int8 like the scales
weight_shape       [2]                   N and K
weight_g_idx       int32 [K]             the group of each input, with actorder "group"
weight[n, k] = weight_scale[n, g] * (code[n, k] - weight_zero_point[n, g])

MXFP4 has weight_packed uint8 [N, K/2], the first of two inputs in the low nibble, and exponents weight_scale uint8 [N, K/32].
NVFP4 has the same codes, e4m3 weight_scale [N, K/16] and a divisor of the scales, weight_global_scale [1].

Bits and groups are inferred from a weight's tensors, so the config's layer patterns are not needed. Activation quantization
is not supported: activations stay unquantized.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant.grouped import from_codes, group_indexes, unpack_first
from auraflux.weights.fields import NAME, WIDTH, Fields
from auraflux.weights.formats.methods import fp8, mxfp4, nvfp4
from auraflux.weights.formats.methods.method import (
    BIT_COUNT,
    DTYPES,
    GROUP_SIZE,
    Header,
    StoredFormat,
    affine_format,
    check_width,
    expect,
    group_count,
    part,
)
from auraflux.weights.formats.stored import Stored
from auraflux.weights.formats.untrusted import OBJECT, list_of, mapping_of, shown

MXFP4, NVFP4 = "mxfp4-pack-quantized", "nvfp4-pack-quantized"
NAMES = nvfp4.Names("weight_packed", "weight_scale", "weight_global_scale")
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", MXFP4, NVFP4, "dense", "mixed-precision")
ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")
INTEGERS = ("I32", "I64")


@dataclass(frozen=True)
class CompressedTensors:
    """Formats that occur in a config.

    bits, groups  of integer codes
    blocks        of FP8
    activations   whether the config quantizes activations
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

    def plan(self, headers: Mapping[str, Header], read: Callable[[str], Tensor]) -> StoredFormat:
        if "weight_packed" not in headers and headers["weight"].dtype == fp8.CODES:
            return fp8.plan(headers, "weight_scale", self.blocks)
        if "weight_packed" in headers and headers["weight_packed"].dtype == nvfp4.OCTETS:
            if "weight_zero_point" in headers:
                raise FormatError("its weight_zero_point is not valid for four-bit floats.")
            if NAMES.factor in headers:
                return nvfp4.plan(headers, NAMES, divided=True)
            return mxfp4.plan(headers, NAMES.codes, NAMES.scales, (nvfp4.OCTETS,))
        shape, bits = (
            self._packed(headers, read)
            if "weight_packed" in headers
            else (
                part(headers, "weight", ("I8",)),
                self._int8_bits,
            )
        )
        (rows, width), scales = shape, headers.get("weight_scale", Header((), ""))
        check_width(width)
        groups = 1 if len(scales.shape) < 2 else scales.shape[1]
        if scales.dtype not in DTYPES or scales.shape not in ((), (1,), (1, 1), (rows, groups)):
            raise FormatError(
                f"its weight_scale is {scales.dtype or 'missing'} of shape {shown(list(scales.shape))}; "
                f"one scale per row for {rows} rows, or a single scale, is needed."
            )
        group = self._group(width, groups)
        zeros = headers.get("weight_zero_point")
        if zeros is not None and zeros.dtype == "I32":
            expect(headers, "weight_zero_point", ("I32",), (-(-rows * bits // 32), groups))
        elif zeros is not None:
            expect(headers, "weight_zero_point", ("I8",), scales.shape)
        g_idx = group_indexes(width, group)
        if "weight_g_idx" in headers:
            expect(headers, "weight_g_idx", INTEGERS, (width,))
            g_idx = _checked_g_idx(read("weight_g_idx"), groups, g_idx)
        return affine_format(self.title, (rows, width), bits, group, g_idx, scales.dtype, zeros is None)

    def _packed(self, headers: Mapping[str, Header], read: Callable[[str], Tensor]) -> tuple[tuple[int, ...], int]:
        rows, words = part(headers, "weight_packed", ("I32",))
        expect(headers, "weight_shape", INTEGERS, (2,))
        shape = tuple(map(int, read("weight_shape")))
        return shape, self._bits(shape, rows, words)

    @property
    def _int8_bits(self) -> int:
        """Bits of the codes of int8 weights; W4A8 stores four-bit codes so.

        Four bits of 8 loaded as 8 bits would cost accuracy: products of codes plus 128 would cancel.
        """
        return 4 if max(self.bits) <= 4 else 8

    def _bits(self, shape: tuple[int, ...], rows: int, words: int) -> int:
        if shape[0] == rows and shape[1] > 0:
            for bits in sorted(self.bits):
                if -(-shape[1] * bits // 32) == words:
                    return bits
        raise FormatError(
            f"its weight_packed has shape {[rows, words]}, which does not hold {shown(list(shape))} at {sorted(self.bits)} "
            "bits packed into 32-bit words."
        )

    def _group(self, width: int, groups: int) -> int:
        if groups == 1:
            return width
        for group in sorted(self.groups):
            if group_count(width, group) == groups:
                return group
        raise FormatError(f"its {width} inputs have {groups} scales; group sizes in config.json: {sorted(self.groups)}.")

    def load(self, parts: Mapping[str, Tensor]) -> Stored:
        scales = parts["weight_scale"]
        if "weight" in parts and parts["weight"].is_floating_point():
            return fp8.load(parts["weight"], scales, self.blocks)
        if "weight_packed" in parts and parts["weight_packed"].dtype is torch.uint8:
            if NAMES.factor in parts:
                return nvfp4.load(parts["weight_packed"], scales, parts[NAMES.factor], divided=True)
            return mxfp4.load(parts["weight_packed"], scales)
        if "weight_packed" in parts:
            packed, shape = parts["weight_packed"], tuple(map(int, parts["weight_shape"]))
            bits = self._bits(shape, *packed.shape)
        else:
            shape, bits = tuple(parts["weight"].shape), self._int8_bits
            packed = _pack_int8(parts["weight"], bits)
        rows, width = shape
        scales = scales.view(1, 1).expand(rows, 1) if scales.numel() == 1 else scales
        groups = scales.shape[1]
        zeros = _zeros(parts.get("weight_zero_point"), bits, rows, groups)
        g_idx = group_indexes(width, self._group(width, groups))
        if "weight_g_idx" in parts:
            g_idx = _checked_g_idx(parts["weight_g_idx"], groups, g_idx)
        return from_codes(packed, scales, zeros, bits, g_idx, "weight_zero_point" not in parts)

    def notes(self) -> list[str]:
        return ["config.json quantizes activations, which is not supported: they stay unquantized."] if self.activations else []


def _pack_int8(codes: Tensor, bits: int) -> Tensor:
    """Pack signed codes [N, K] at 4 or 8 bits into 32-bit words, plus half their range."""
    if bits == 8:
        unsigned = codes.view(torch.uint8) ^ 128
        return torch.nn.functional.pad(unsigned, (0, -codes.shape[1] % 4)).view(torch.int32)
    least, most = int(codes.min()), int(codes.max())
    if least < -8 or most > 7:
        raise FormatError(f"its weight has codes from {least} to {most}; four bits hold -8 to 7.")
    nibbles = torch.nn.functional.pad((codes + 8).view(torch.uint8), (0, -codes.shape[1] % 8))
    return (nibbles[:, ::2] | nibbles[:, 1::2] << 4).contiguous().view(torch.int32)


def _zeros(found: Tensor | None, bits: int, rows: int, groups: int) -> Tensor:
    """Return zeros [N, G] in the unsigned range of the packed codes."""
    half = 2 ** (bits - 1)
    if found is None:
        return torch.tensor(half).expand(rows, groups)
    if found.dtype is torch.int32:
        return unpack_first(found.t().contiguous(), bits, rows).t()
    return (found.to(torch.int16) + half).view(-1, groups).expand(rows, groups)


def _checked_g_idx(found: Tensor, groups: int, usual: Tensor) -> Tensor:
    least, most = int(found.min()), int(found.max())
    # -1: never set
    if least == most == -1:
        return usual
    if least < 0 or most >= groups:
        raise FormatError(f"its weight_g_idx has indexes from {least} to {most}; it has {groups} groups.")
    return found.to(torch.int64)


def open_method(config: Fields) -> CompressedTensors:
    """Read `quantization_config`."""
    config.get("config_groups", mapping_of(OBJECT, 1024), {})
    groups = [*config.section("config_groups").sections().values()]
    weights = [each.section("weights") for each in groups if "weights" in each]
    if not weights:
        raise FormatError("compressed-tensors without weights in its config_groups is not read.")
    for layout in {each.get("format", NAME, "") or config.get("format", NAME, "") or FORMATS[0] for each in groups}:
        if layout not in FORMATS:
            known = ", ".join(FORMATS)
            raise FormatError(f"compressed-tensors in format {shown(layout)} is not supported. Supported: {known}.")
    for each in weights:
        kind, bits = each.get("type", NAME, "") or "int", each.get("num_bits", BIT_COUNT, 8)
        if kind != "int" and (kind, bits) not in (("float", 8), ("float", 4)):
            raise FormatError(f"compressed-tensors with weights of type {shown(kind)} and {bits} bits is not supported.")
    sizes = sorted({size for each in weights if (size := each.get("group_size", GROUP_SIZE, 0)) > 0})
    blocks = [each.get("block_structure", list_of(WIDTH, 2), []) for each in weights]
    return CompressedTensors(
        frozenset(each.get("num_bits", BIT_COUNT, 8) for each in weights),
        frozenset(sizes),
        fp8.Blocks((*((block[0], block[1]) for block in blocks if len(block) == 2), *((1, size) for size in sizes)), False),
        any(each.section("input_activations") for each in groups),
    )
