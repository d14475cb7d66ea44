"""GPTQ: two, three, four or eight bits, packed along the inputs.

qweight  int32 [K*bits/32, N]    codes, bit-packed along the inputs
qzeros   int32 [K/G, N*bits/32]  bit-packed along the outputs; minus one in checkpoint_format "gptq", not in "gptq_v2"
scales   [K/G, N]
g_idx    int32 [K]               group of each input; not sorted with act-order
weight[n, k] = scales[g, n] * (code[k, n] - zero[g, n]),  g = g_idx[k], or k/G without g_idx
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant.grouped import from_codes, group_indexes, unpack_first
from auraflux.weights.fields import NAME, Fields
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
from auraflux.weights.formats.untrusted import FLAG, OBJECT, either, shown

BITS = (2, 3, 4, 8)
# added to the stored zeros, by checkpoint_format
ZERO_OFFSET = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True)
class GPTQ:
    """GPTQ with one format, or with `mixed` several, inferred from each weight's tensors.

    group        None for one scale per row
    zero_offset  added to the stored zeros
    """

    bits: int
    group: int | None
    zero_offset: int
    symmetric: bool
    mixed: bool
    title: ClassVar[str] = "GPTQ"
    parts: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "g_idx")
    unused: ClassVar[tuple[str, ...]] = ()

    def claims(self, found: Iterable[str]) -> bool:
        return "qweight" in found

    def plan(self, headers: Mapping[str, Header], read: Callable[[str], Tensor]) -> StoredFormat:
        words, rows = part(headers, "qweight", ("I32",))
        groups, _ = part(headers, "scales", DTYPES)
        _, zero_words = part(headers, "qzeros", ("I32",))
        bits = self._bits(rows, zero_words)
        width = words * 32 // bits
        check_width(width)
        if width * bits != words * 32:
            raise FormatError(f"its qweight has {words} rows, which do not hold a whole number of {bits}-bit inputs.")
        group = self._group(width, groups)
        expect(headers, "scales", DTYPES, (group_count(width, group), rows))
        expect(headers, "qzeros", ("I32",), (group_count(width, group), -(-rows * bits // 32)))
        g_idx = group_indexes(width, group)
        if "g_idx" in headers:
            expect(headers, "g_idx", ("I32", "I64"), (width,))
            g_idx = _checked_g_idx(read("g_idx"), groups)
        scales = headers["scales"].dtype
        return affine_format(self.title, (rows, width), bits, group, g_idx, scales, self.symmetric)

    def _bits(self, rows: int, zero_words: int) -> int:
        # with few rows, several bit widths need equally many words
        candidates = (self.bits, *BITS) if self.mixed else (self.bits,)
        found = next((bits for bits in candidates if -(-rows * bits // 32) == zero_words), None)
        if found is None:
            needed = -(-rows * self.bits // 32)
            raise FormatError(
                f"its qzeros have {zero_words} columns; {needed} are needed for {self.bits} bits and {rows} outputs."
            )
        return found

    def _group(self, width: int, groups: int) -> int:
        group = self.group or width
        return width // groups if self.mixed and group_count(width, group) != groups and width % groups == 0 else group

    def load(self, parts: Mapping[str, Tensor]) -> Stored:
        codes, scales, words = parts["qweight"].t().contiguous(), parts["scales"].t(), parts["qzeros"]
        rows, groups = scales.shape
        bits = self._bits(rows, words.shape[1])
        width = codes.shape[1] * 32 // bits
        # a zero point of 0 is stored as the largest code, so the sum wraps
        zeros = unpack_first(words, bits, rows).t() + self.zero_offset & 2**bits - 1
        g_idx = group_indexes(width, self._group(width, groups))
        if "g_idx" in parts:
            g_idx = _checked_g_idx(parts["g_idx"], groups)
        return from_codes(codes, scales, zeros, bits, g_idx, self.symmetric)

    def notes(self) -> list[str]:
        return []


def _checked_g_idx(g_idx: Tensor, groups: int) -> Tensor:
    least, most = int(g_idx.min()), int(g_idx.max())
    if least < 0 or most >= groups:
        raise FormatError(f"its g_idx has indexes from {least} to {most}; it has {groups} groups.")
    return g_idx.to(torch.int64)


def open_method(config: Fields) -> GPTQ:
    """Read `quantization_config`."""
    bits, group = config.get("bits", BIT_COUNT, None), config.get("group_size", GROUP_SIZE, 128)
    layout = (config.get("checkpoint_format", NAME, "") or config.get("format", NAME, "") or "gptq").lower()
    if bits is None or bits not in BITS:
        raise FormatError(f"GPTQ with {shown(bits)} bits is not supported. Supported: {', '.join(map(str, BITS))}.")
    if layout not in ZERO_OFFSET:
        raise FormatError(f"GPTQ in checkpoint_format {shown(layout)} is not supported. Supported: {', '.join(ZERO_OFFSET)}.")
    dynamic = bool(config.get("dynamic", either(OBJECT, FLAG), False))
    return GPTQ(bits, None if group < 0 else group, ZERO_OFFSET[layout], config.get("sym", FLAG, False), dynamic)
