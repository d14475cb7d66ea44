"""The matrices of all experts of one projection, as one stack."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from auraflux.errors import FormatError
from auraflux.quant import QTensor
from auraflux.weights.slices import cut
from auraflux.weights.stored import Stored, dense, is_blank


@dataclass(frozen=True)
class Source:
    """Where one projection of all experts is.

    matrix   gives an expert's
    release  says that it was copied
    """

    matrix: Callable[[int], Stored]
    release: Callable[[int], None] = lambda expert: None

    def some(self, experts: Sequence[int]) -> "Source":
        """The same, of some experts, numbered from 0 in their order."""
        return Source(lambda number: self.matrix(experts[number]), lambda number: self.release(experts[number]))

    def cut(self, rows: range | None, columns: range | None) -> "Source":
        """The same, of some rows or columns of every expert."""
        return Source(lambda expert: cut(self.matrix(expert), rows, columns), self.release)


def stacked(name: str, count: int, source: Source, made: Callable[[int], Stored]) -> Stored:
    """Put experts' matrices together as they are made ready, one after the other; a blank where the first is one."""
    first = made(0)
    if is_blank(first):
        for expert in range(1, count):
            source.matrix(expert)
        return first.expand(count, *first.shape)
    experts = (first if expert == 0 else made(expert) for expert in range(count))
    if isinstance(first, QTensor):
        return _stacked_codes(name, count, first, experts, source.release)
    whole = torch.empty(count, *first.shape, dtype=first.dtype, device=first.device)
    for expert, one in enumerate(experts):
        # one that is missing is not written, so that a config may name any number of them
        if not is_blank(one):
            whole[expert] = dense(one)
        source.release(expert)
    return whole


def _stacked_codes(name: str, count: int, first: QTensor, experts: Iterable[Stored], release: Callable[[int], None]) -> QTensor:
    arrays: dict[str, Any] = {
        part: torch.empty(count, *array.shape, dtype=array.dtype, device=array.device)
        for part in ("packed", "scales", "biases")
        if (array := getattr(first, part)) is not None
    }
    for expert, one in enumerate(experts):
        if is_blank(one):
            continue
        if not isinstance(one, QTensor) or (one.format, one.kind) != (first.format, first.kind):
            raise FormatError(f"expert {expert} in {name} is {_form(one)}, and expert 0 is {_form(first)}.")
        for part, array in arrays.items():
            array[expert] = getattr(one, part)
        release(expert)
    return replace(first, **arrays, shape=(count, *first.shape))


def _form(found: Stored) -> str:
    return f"{found!r} with scales in {found.scales.dtype}" if isinstance(found, QTensor) else f"dense in {found.dtype}"
