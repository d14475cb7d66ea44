"""`Method`: interface of a quantization method's reader, and checks shared by readers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant import affine
from auraflux.quant.grouped import kernel_group, memory_bits
from auraflux.weights.fields import WIDTH
from auraflux.weights.formats.stored import Stored
from auraflux.weights.formats.untrusted import either, integer, shown

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
WIDEST = 1 << 20  # inputs of a weight
# kinds of values in quantization_config
BIT_COUNT, GROUP_SIZE = integer(1, 64), either(integer(-1, -1), WIDTH)


class Header(NamedTuple):
    """Shape and safetensors dtype of a tensor, from its file's header."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class StoredFormat:
    """Format of one weight once loaded.

    shape      of the dequantized matrix
    label      name of the format
    bits       per weight in memory, scales included
    precision  bit-exact or the deviation from the file's values, then a colon and the formula
    """

    shape: tuple[int, ...]
    label: str
    bits: float
    precision: str

    @property
    def precision_summary(self) -> str:
        """Precision without the formula, for tables."""
        return self.precision.partition(":")[0]


class Method(Protocol):
    """Quantization method of a folder. The tensors of a weight are stored under the name of its module.

    title   display name
    parts   tensors of a weight that are loaded, optional ones included
    unused  tensors of a module that are ignored
    """

    title: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    unused: ClassVar[tuple[str, ...]]

    def claims(self, found: Iterable[str]) -> bool:
        """Return whether a module with these tensors has a weight of this method."""

    def plan(self, headers: Mapping[str, Header], read: Callable[[str], Tensor]) -> StoredFormat:
        """Return the format of a weight and raise if it does not match the config; `read` loads a small tensor."""

    def load(self, parts: Mapping[str, Tensor]) -> Stored:
        """Return the weight; `plan` has validated its headers."""

    def notes(self) -> list[str]:
        """Return notes on unsupported settings of the config, one sentence each."""


EXACT = "bit-exact: scale * (code - zero)"
WIDE_SCALES = (
    "exact except for the last bits: with float32 scales, scale * code is rounded by less than a ten-thousandth of a "
    "quantization step"
)


def part(headers: Mapping[str, Header], name: str, dtypes: Iterable[str], dimensions: int = 2) -> tuple[int, ...]:
    """Return the shape of a required tensor after checking its dtype and number of dimensions."""
    if name not in headers:
        raise FormatError(f"it has no {name}.")
    shape, dtype = headers[name]
    if dtype not in dtypes:
        raise FormatError(f"its {name} is {dtype}; {' or '.join(dtypes)} is needed.")
    if len(shape) != dimensions or not all(shape):
        raise FormatError(f"its {name} has shape {shown(list(shape))}; {dimensions} non-empty dimensions are needed.")
    return shape


def expect(headers: Mapping[str, Header], name: str, dtypes: Iterable[str], shape: tuple[int, ...]) -> None:
    """Raise unless a tensor has this shape."""
    found = part(headers, name, dtypes, len(shape))
    if found != shape:
        raise FormatError(f"its {name} has shape {shown(list(found))}; {shown(list(shape))} is needed.")


def check_width(width: int) -> None:
    if width > WIDEST:
        raise FormatError(f"it has {width:,} inputs; at most {WIDEST:,} are supported.")


def affine_format(
    title: str, shape: tuple[int, int], bits: int, group: int, g_idx: Tensor, scales: str, symmetric: bool
) -> StoredFormat:
    """Return the format of integer codes with these scales, see `from_codes`."""
    if bits not in affine.BITS:
        raise FormatError(f"it has {bits} bits; {', '.join(map(str, affine.BITS))} are supported.")
    supported, dtype = kernel_group(g_idx), DTYPES[scales]
    granularity = "whole rows" if group >= shape[1] else f"groups of {group}"
    each = memory_bits(bits, supported, dtype, symmetric)
    if supported is None:
        why = "with act-order" if _is_scattered(g_idx) else "which no kernel supports"
        advice = "--quantize 8, or convert --bits 8, requantizes them"
        precision = f"exact, but stored as float32: {bits} bits in {granularity} {why}. {advice}"
        return StoredFormat(shape, f"{title} {bits} bits, {granularity}, as float32", each, precision)
    return StoredFormat(shape, f"{title} {bits} bits, {granularity}", each, WIDE_SCALES if dtype is torch.float32 else EXACT)


def _is_scattered(g_idx: Tensor) -> bool:
    return bool((g_idx.diff() < 0).any())


def group_count(width: int, group: int) -> int:
    return -(-width // group)
