"""AWQ in its layout "gemm": four bits, the outputs of a word in an order of their own.

qweight  int32 [K, N/8]    codes, eight outputs of one input in a word
qzeros   int32 [K/G, N/8]  likewise
scales   [K/G, N]
weight[n, k] = scales[k/G, n] * (code[k, n] - zero[k/G, n])
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant.grouped import from_codes, owners_of, pack_nibbles
from auraflux.weights.boundary import shown
from auraflux.weights.methods.method import DTYPES, Header, Held, check_width, expect, group_count, held_codes, part
from auraflux.weights.stored import Stored

BITS, PER_WORD = 4, 8
# nibble i of a word, from the lowest, is output ORDER[i] of its eight
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SHIFTS = tuple(4 * ORDER.index(output) for output in range(PER_WORD))


@dataclass(frozen=True)
class AWQ:
    """group is None for whole rows."""

    group: int | None
    title: ClassVar[str] = "AWQ"
    parts: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    unused: ClassVar[tuple[str, ...]] = ("g_idx",)

    def claims(self, found: Iterable[str]) -> bool:
        return "qweight" in found

    def plan(self, headers: Mapping[str, Header], read: Callable[[str], Tensor]) -> Held:
        width, words = part(headers, "qweight", ("I32",))
        check_width(width)
        group = self.group or width
        groups = group_count(width, group)
        expect(headers, "qzeros", ("I32",), (groups, words))
        expect(headers, "scales", DTYPES, (groups, words * PER_WORD))
        shape = words * PER_WORD, width
        return held_codes(self.title, shape, BITS, group, owners_of(width, group), headers["scales"].dtype, False)

    def load(self, parts: Mapping[str, Tensor]) -> Stored:
        codes, zeros = (_outputs(parts[name]) for name in ("qweight", "qzeros"))
        width = codes.shape[0]
        # inputs that fill up the last word stand for none of the weight's
        codes = torch.nn.functional.pad(codes, (0, 0, 0, -width % PER_WORD))
        packed = pack_nibbles(codes.t().contiguous())
        return from_codes(packed, parts["scales"].t(), zeros.t(), BITS, owners_of(width, self.group or width), False)

    def notes(self) -> list[str]:
        return []


def _outputs(words: Tensor) -> Tensor:
    """The codes of words in the order of the outputs: int32 [K, N/8] -> uint8 [K, N]."""
    codes = torch.empty(*words.shape, PER_WORD, dtype=torch.uint8)
    for output, shift in enumerate(SHIFTS):
        codes[..., output] = (words >> shift & 15).to(torch.uint8)
    return codes.flatten(1)


def open_method(config: dict[str, Any]) -> AWQ:
    """Read `quantization_config`."""
    # the second names are those of the first files
    bits = config.get("bits") or config.get("w_bit") or BITS
    group = config.get("group_size") or config.get("q_group_size") or 128
    layout = str(config.get("version") or config.get("format") or "gemm").lower()
    if bits != BITS:
        raise FormatError(f"AWQ with {shown(bits)} bits is not read; it has {BITS}.")
    if layout != "gemm":
        raise FormatError(f"AWQ in layout {shown(layout)} is not read, only 'gemm'. Quantize the model with version 'gemm'.")
    return AWQ(None if group < 0 else group)
