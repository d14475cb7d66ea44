"""A mixed batch: a step of writing and a piece of a prompt that go through a model as one."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from auraflux.cache.batch import Batch

Rows = TypeVar("Rows", Tensor, Tensor | None)


class Beside:
    """What sees each token by itself is given both at once and reads its weights once; what reads other tokens sees them apart.

    writing  one token of each of its sequences; these come first
    reading  a piece of one sequence's prompt after which nobody asks what follows
    single   see `Batch`
    """

    single = False

    def __init__(self, writing: Batch, reading: Batch):
        self.writing, self.reading = writing, reading

    def extend(self, size: int, extra: int) -> None:
        """Make room for a token of each sequence that is written, and `size` of the one that is read. All or nothing.

        extra  how many of these fill it up
        """
        ones = [1] * len(self.writing.sequences)
        self.writing.prepare(ones)
        self.reading.prepare([size])
        # for all before any is longer: a row gives up what its length says is no longer seen
        for part in self.reading.sequences[0].rows:
            self.writing.find_room(part, [*self.writing.steps(part, ones), *self.reading.steps(part, [size])])
        self.writing.take_room(ones, None)
        self.reading.take_room([size], extra)

    @property
    def counts(self) -> list[int]:
        return [*self.writing.counts, *self.reading.counts]

    @property
    def lengths(self) -> list[int]:
        """Of all sequences, those that are written first."""
        return [sequence.length for batch in (self.writing, self.reading) for sequence in batch.sequences]

    def cut_back(self, lengths: list[int]) -> None:
        """Take back tokens that did not get through all layers, see `Batch`."""
        self.writing.cut_back(lengths[:-1])
        self.reading.cut_back(lengths[-1:])

    def split(self, rows: Rows) -> tuple[Rows, Rows]:
        """What belongs to the tokens of each part, [T, ...]; nothing where there is nothing."""
        count = self.writing.tokens
        return (rows, rows) if rows is None else (rows[:count], rows[count:])

    def apart(self, work: Callable[..., Any], *rows: Tensor | None) -> Any:
        """Do some work for each part and its rows: what it gives, a tensor or several, is put together again."""
        first, second = zip(*map(self.split, rows), strict=True)
        found = work(self.writing, *first), work(self.reading, *second)
        if isinstance(found[0], Tensor):
            return torch.cat(found)
        return tuple(torch.cat(each) for each in zip(*found, strict=True))
