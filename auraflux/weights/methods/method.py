"""`Method`: what a reader of quantized folders has to say, and the checks that readers share."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant import affine
from auraflux.quant.grouped import held_group, memory_bits
from auraflux.weights.boundary import shown
from auraflux.weights.stored import Stored

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
WIDEST = 1 << 20  # inputs of a weight


class Header(NamedTuple):
    """What a file says of a tensor before it is read; `dtype` as safetensors calls it."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Held:
    """How a weight will be held.

    shape  of the matrix it stands for
    label  its format in words
    bits   of one weight in memory, with its share of scales
    kept   whether the weight is what its file says to the bit, or by how much it is not, then a colon and how; a sentence of a
           note
    """

    shape: tuple[int, ...]
    label: str
    bits: float
    kept: str

    @property
    def kept_briefly(self) -> str:
        """The same without how, for tables."""
        return self.kept.partition(":")[0]


class Method(Protocol):
    """One way of quantizing a folder's weights. What a weight consists of lies under the name of its module.

    title   as people call it
    parts   the tensors of a weight that are read, those that it may lack too
    unused  tensors beside it that are not
    """

    title: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    unused: ClassVar[tuple[str, ...]]

    def claims(self, found: Iterable[str]) -> bool:
        """Whether a module with these tensors has a weight of this method."""

    def plan(self, headers: Mapping[str, Header], read: Callable[[str], Tensor]) -> Held:
        """Say how a weight will be held, and refuse one that is not what the config says; `read` gives a small part."""

    def load(self, parts: Mapping[str, Tensor]) -> Stored:
        """The weight. Its headers were planned with."""

    def notes(self) -> list[str]:
        """What of the config is not honoured, one sentence each."""


EXACT = "kept to the bit: scale * (code - zero)"
WIDE_SCALES = (
    "kept but for the last bits: scales in float32 leave scale * code no room, which differs by less than a ten-thousandth "
    "of a step"
)


def part(headers: Mapping[str, Header], name: str, dtypes: Iterable[str], dimensions: int = 2) -> tuple[int, ...]:
    """The shape of a part that must be there, of one of these dtypes and with so many dimensions."""
    if name not in headers:
        raise FormatError(f"it has no {name}.")
    shape, dtype = headers[name]
    if dtype not in dtypes:
        raise FormatError(f"its {name} is {dtype}; {' or '.join(dtypes)} is needed.")
    if len(shape) != dimensions or not all(shape):
        raise FormatError(f"its {name} has shape {shown(list(shape))}; {dimensions} dimensions that are not empty are needed.")
    return shape


def expect(headers: Mapping[str, Header], name: str, dtypes: Iterable[str], shape: tuple[int, ...]) -> None:
    """Refuse a part of another shape."""
    found = part(headers, name, dtypes, len(shape))
    if found != shape:
        raise FormatError(f"its {name} has shape {shown(list(found))}; {shown(list(shape))} is needed.")


def check_width(width: int) -> None:
    if width > WIDEST:
        raise FormatError(f"it has {width:,} inputs; at most {WIDEST:,} are read.")


def held_codes(title: str, shape: tuple[int, int], bits: int, group: int, owners: Tensor, scales: str, symmetric: bool) -> Held:
    """How codes with such scales are held, see `from_codes`."""
    if bits not in affine.BITS:
        raise FormatError(f"it has {bits} bits; {', '.join(map(str, affine.BITS))} are read.")
    mine, dtype = held_group(owners), DTYPES[scales]
    spread = "whole rows" if group >= shape[1] else f"groups of {group}"
    each = memory_bits(bits, mine, dtype, symmetric)
    if mine is None:
        why = "whose inputs are not in the order of their groups" if _scattered(owners) else "which no kernel has groups for"
        kept = f"exact, but held in float32: {bits} bits in {spread} {why}. --quantize 8, or convert --bits 8, rounds them anew"
        return Held(shape, f"{title} {bits} bits, {spread}, as float32", each, kept)
    return Held(shape, f"{title} {bits} bits, {spread}", each, WIDE_SCALES if dtype is torch.float32 else EXACT)


def _scattered(owners: Tensor) -> bool:
    return bool((owners.diff() < 0).any())


def group_count(width: int, group: int) -> int:
    return -(-width // group)
