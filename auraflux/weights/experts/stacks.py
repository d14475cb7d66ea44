"""Matrices of all experts of one projection, stacked into one tensor."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from auraflux.errors import FormatError
from auraflux.quant import QTensor
from auraflux.weights.formats.stored import Stored, dense, is_placeholder
from auraflux.weights.parallel.tensor_slices import cut


@dataclass(frozen=True)
class ExpertSource:
    """Source of one projection of all experts.

    matrix   returns the matrix of an expert
    release  called when it has been copied
    """

    matrix: Callable[[int], Stored]
    release: Callable[[int], None] = lambda expert: None

    def select(self, experts: Sequence[int]) -> "ExpertSource":
        """Return the source of some experts, numbered from 0 in the order given."""
        return ExpertSource(lambda number: self.matrix(experts[number]), lambda number: self.release(experts[number]))

    def cut(self, rows: range | None, columns: range | None) -> "ExpertSource":
        """Return the source of some rows or columns of every expert."""
        return ExpertSource(lambda expert: cut(self.matrix(expert), rows, columns), self.release)


def stack_experts(name: str, count: int, source: ExpertSource, made: Callable[[int], Stored]) -> Stored:
    """Stack the matrices that `made` returns for each expert, one after the other; a placeholder if the first is one."""
    first = made(0)
    if is_placeholder(first):
        for expert in range(1, count):
            source.matrix(expert)
        return first.expand(count, *first.shape)
    experts = (first if expert == 0 else made(expert) for expert in range(count))
    if isinstance(first, QTensor):
        return _stack_quantized(name, count, first, experts, source.release)
    stack = torch.empty(count, *first.shape, dtype=first.dtype, device=first.device)
    for expert, matrix in enumerate(experts):
        # a missing expert allocates no pages, so that an untrusted config may name any number of them
        if not is_placeholder(matrix):
            stack[expert] = dense(matrix)
        source.release(expert)
    return stack


def _stack_quantized(
    name: str, count: int, first: QTensor, experts: Iterable[Stored], release: Callable[[int], None]
) -> QTensor:
    arrays: dict[str, Any] = {
        part: torch.empty(count, *array.shape, dtype=array.dtype, device=array.device)
        for part in ("packed", "scales", "biases")
        if (array := getattr(first, part)) is not None
    }
    for expert, matrix in enumerate(experts):
        if is_placeholder(matrix):
            continue
        if not isinstance(matrix, QTensor) or (matrix.format, matrix.kind) != (first.format, first.kind):
            raise FormatError(f"expert {expert} in {name} is {describe(matrix)}, and expert 0 is {describe(first)}.")
        for part, array in arrays.items():
            array[expert] = getattr(matrix, part)
        release(expert)
    return replace(first, **arrays, shape=(count, *first.shape))


def describe(found: Stored) -> str:
    """Describe a weight's format, for error messages."""
    return f"{found!r} with scales in {found.scales.dtype}" if isinstance(found, QTensor) else f"dense in {found.dtype}"
