"""GPTQ: two, three, four or eight bits, packed along the inputs.

qweight  int32 [K*bits/32, N]    codes, a bit stream along the inputs of each output
qzeros   int32 [K/G, N*bits/32]  a bit stream along the outputs; less one in checkpoint_format "gptq", not so in "gptq_v2"
scales   [K/G, N]
g_idx    int32 [K]               the group of each input; in act-order they do not follow each other
weight[n, k] = scales[g, n] * (code[k, n] - zero[g, n]),  g = g_idx[k], or k/G where there is none
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant.grouped import from_codes, owners_of, unpacked
from auraflux.weights.boundary import shown
from auraflux.weights.methods.method import DTYPES, Header, Held, check_width, expect, group_count, held_codes, part
from auraflux.weights.stored import Stored

BITS = (2, 3, 4, 8)
# what the stored zeros lack
LACKING = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True)
class GPTQ:
    """One format for all weights, or with `mixed` several: then a weight's tensors tell its bits and group.

    group    None for whole rows
    lacking  what is to be added to the zeros
    """

    bits: int
    group: int | None
    lacking: int
    symmetric: bool
    mixed: bool
    title: ClassVar[str] = "GPTQ"
    parts: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "g_idx")
    unused: ClassVar[tuple[str, ...]] = ()

    def claims(self, found: Iterable[str]) -> bool:
        return "qweight" in found

    def plan(self, headers: Mapping[str, Header], read: Callable[[str], Tensor]) -> Held:
        words, rows = part(headers, "qweight", ("I32",))
        groups, _ = part(headers, "scales", DTYPES)
        _, zero_words = part(headers, "qzeros", ("I32",))
        bits = self._bits(rows, zero_words)
        width = words * 32 // bits
        check_width(width)
        if width * bits != words * 32:
            raise FormatError(f"its qweight has {words} rows, which are no whole number of inputs of {bits} bits.")
        group = self._group(width, groups)
        expect(headers, "scales", DTYPES, (group_count(width, group), rows))
        expect(headers, "qzeros", ("I32",), (group_count(width, group), -(-rows * bits // 32)))
        owners = owners_of(width, group)
        if "g_idx" in headers:
            expect(headers, "g_idx", ("I32", "I64"), (width,))
            owners = _checked(read("g_idx"), groups)
        scales = headers["scales"].dtype
        return held_codes(self.title, (rows, width), bits, group, owners, scales, self.symmetric)

    def _bits(self, rows: int, zero_words: int) -> int:
        # of few rows, the zeros of several widths fill as many words
        likely = (self.bits, *BITS) if self.mixed else (self.bits,)
        told = next((bits for bits in likely if -(-rows * bits // 32) == zero_words), None)
        if told is None:
            needed = -(-rows * self.bits // 32)
            raise FormatError(
                f"its qzeros have {zero_words} columns; {needed} are needed for {self.bits} bits and {rows} outputs."
            )
        return told

    def _group(self, width: int, groups: int) -> int:
        group = self.group or width
        return width // groups if self.mixed and group_count(width, group) != groups and width % groups == 0 else group

    def load(self, parts: Mapping[str, Tensor]) -> Stored:
        codes, scales, words = parts["qweight"].t().contiguous(), parts["scales"].t(), parts["qzeros"]
        rows, groups = scales.shape
        bits = self._bits(rows, words.shape[1])
        width = codes.shape[1] * 32 // bits
        # a zero of nothing was stored as the largest code
        zeros = unpacked(words, bits, rows).t() + self.lacking & 2**bits - 1
        owners = owners_of(width, self._group(width, groups))
        if "g_idx" in parts:
            owners = _checked(parts["g_idx"], groups)
        return from_codes(codes, scales, zeros, bits, owners, self.symmetric)

    def notes(self) -> list[str]:
        return []


def _checked(owners: Tensor, groups: int) -> Tensor:
    least, most = int(owners.min()), int(owners.max())
    if least < 0 or most >= groups:
        raise FormatError(f"its g_idx has numbers from {least} to {most}; it has {groups} groups.")
    return owners.to(torch.int64)


def open_method(config: dict[str, Any]) -> GPTQ:
    """Read `quantization_config`."""
    bits, group = config.get("bits"), config.get("group_size") or 128
    layout = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    if bits not in BITS:
        raise FormatError(f"GPTQ with {shown(bits)} bits is not read. Bits that are: {', '.join(map(str, BITS))}.")
    if layout not in LACKING:
        raise FormatError(f"GPTQ in checkpoint_format {shown(layout)} is not read. Those that are: {', '.join(LACKING)}.")
    group = None if group < 0 else group
    return GPTQ(bits, group, LACKING[layout], config.get("sym") is True, bool(config.get("dynamic")))
