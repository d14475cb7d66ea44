"""AWQ in its "gemm" layout: four bits, outputs permuted within each word.

qweight  int32 [K, N/8]    codes, eight outputs of one input per word
qzeros   int32 [K/G, N/8]  zeros in the same layout
scales   [K/G, N]
weight[n, k] = scales[k/G, n] * (code[k, n] - zero[k/G, n])
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant.grouped import from_codes, group_indexes, pack_nibbles
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
from auraflux.weights.formats.untrusted import shown

BITS, PER_WORD = 4, 8
# nibble i of a word, from the lowest, is output ORDER[i] of its eight
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SHIFTS = tuple(4 * ORDER.index(output) for output in range(PER_WORD))


@dataclass(frozen=True)
class AWQ:
    """AWQ with one group size; None for one scale per row."""

    group: int | None
    title: ClassVar[str] = "AWQ"
    parts: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    unused: ClassVar[tuple[str, ...]] = ("g_idx",)

    def claims(self, found: Iterable[str]) -> bool:
        return "qweight" in found

    def plan(self, headers: Mapping[str, Header], read: Callable[[str], Tensor]) -> StoredFormat:
        width, words = part(headers, "qweight", ("I32",))
        check_width(width)
        group = self.group or width
        groups = group_count(width, group)
        expect(headers, "qzeros", ("I32",), (groups, words))
        expect(headers, "scales", DTYPES, (groups, words * PER_WORD))
        shape = words * PER_WORD, width
        return affine_format(self.title, shape, BITS, group, group_indexes(width, group), headers["scales"].dtype, False)

    def load(self, parts: Mapping[str, Tensor]) -> Stored:
        codes, zeros = (_unpack(parts[name]) for name in ("qweight", "qzeros"))
        width = codes.shape[0]
        # pad the inputs to a full word
        codes = torch.nn.functional.pad(codes, (0, 0, 0, -width % PER_WORD))
        packed = pack_nibbles(codes.t().contiguous())
        return from_codes(packed, parts["scales"].t(), zeros.t(), BITS, group_indexes(width, self.group or width), False)

    def notes(self) -> list[str]:
        return []


def _unpack(words: Tensor) -> Tensor:
    """Unpack codes in the order of the outputs: int32 [K, N/8] -> uint8 [K, N]."""
    codes = torch.empty(*words.shape, PER_WORD, dtype=torch.uint8)
    for output, shift in enumerate(SHIFTS):
        codes[..., output] = (words >> shift & 15).to(torch.uint8)
    return codes.flatten(1)


def open_method(config: Fields) -> AWQ:
    """Read `quantization_config`."""
    # w_bit and q_group_size are the names in early files
    bits = config.get("bits", BIT_COUNT, config.get("w_bit", BIT_COUNT, BITS))
    group = config.get("group_size", GROUP_SIZE, config.get("q_group_size", GROUP_SIZE, 128))
    layout = (config.get("version", NAME, "") or config.get("format", NAME, "") or "gemm").lower()
    if bits != BITS:
        raise FormatError(f"AWQ with {shown(bits)} bits is not supported, only {BITS}.")
    if layout != "gemm":
        raise FormatError(
            f"AWQ in layout {shown(layout)} is not supported, only 'gemm'. Quantize the model with version 'gemm'."
        )
    return AWQ(None if group < 0 else group)
