"""A call of an op with its addresses taken out, made from a recording of it (`prepared.py` says what for)."""

import struct
import weakref
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from auraflux.ops.simd.alike import Unlike, extents
from auraflux.ops.simd.record import Recording
from auraflux.ops.simd.threads import LINE

MOST_NBYTES = 1 << 24  # of scratch memory: calls that need more take so long that their Python does not matter
FEW = 64  # values that Python may read
SPACE = -1  # stands for scratch memory where others are numbered


class Region(NamedTuple):
    """Memory that kernels are given: whose it is, by number, and where in that it begins."""

    start: int
    end: int
    of: int
    offset: int


class Plan:
    """A call with its addresses taken out.

    outs      shape and dtype of each new tensor among the results
    result    the results in terms of these, see `_form`
    table     what `play` reads
    nbytes    of scratch memory
    pins      arguments with tensors in them that calls so far had in common, by number; addresses of what is derived from them
              may be among the plan's numbers, so others must have them too
    """

    def __init__(self, arguments: int, outs: list[tuple[torch.Size, torch.dtype]], result: Any, table: array, nbytes: int):
        self.outs, self.result, self.table, self.nbytes = outs, result, table, nbytes
        self.at = table.buffer_info()[0]
        self.pins: dict[int, weakref.ref[Any]] = {}
        self.tries = 1
        self.make = [_maker(*each) for each in outs]
        self.write = struct.Struct(f"{arguments + len(outs)}q").pack_into
        self.give = _giver(result)

    def same(self, other: "Plan") -> bool:
        """Whether another call has had the same plan."""
        return (self.outs, self.result, self.table, self.nbytes) == (other.outs, other.result, other.table, other.nbytes)


def _maker(shape: torch.Size, dtype: torch.dtype) -> Callable[[], Tensor]:
    # naming a dtype takes half a microsecond
    return partial(torch.empty, *shape) if dtype is torch.float32 else partial(torch.empty, *shape, dtype=dtype)


def _giver(form: Any) -> Callable[[Any, list[Tensor]], Any]:
    """Make the function that gives results of this form, from arguments and new tensors."""
    if form is None:
        return lambda args, outs: None
    if isinstance(form, list):
        givers = [_giver(each) for each in form]
        return lambda args, outs: tuple([give(args, outs) for give in givers])
    which, number = form
    return (lambda args, outs: args[number]) if which == "argument" else (lambda args, outs: outs[number])


class CallRecording(Recording):
    """The launches of one call, and what memory they use."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[int, int, int]] = []
        self.questions: list[tuple[int, int, int, int]] = []
        self.expected: list[tuple[int, int]] = []
        self.values: list[tuple[int, list[int]]] = []
        self.words: list[tuple[int, bytes]] = []
        self.made: list[tuple[int, int]] = []
        self.scratches: list[tuple[int, int]] = []

    def add(self, code: int, args: array, jobs: int) -> None:
        self.keep(args)
        self.launches.append((code, args.buffer_info()[0], jobs))

    def ask(self, code: int, args: array) -> None:
        self.keep(args)
        start = args.buffer_info()[0]
        self.questions.append((code, start, start + 8 * (len(args) - 1), _rough(args[-1])))

    def looks(self, address: int) -> bool:
        self.expected.append((len(self.launches), address))
        return True

    def read(self, how: str, tensor: Tensor) -> None:
        """Note a few whole numbers, as those that say where sequences begin: other calls must have the same."""
        if how != "tolist" or tensor.dtype is not torch.int32 or tensor.numel() > FEW or not tensor.is_contiguous():
            self.spoil(f"Python reads a value with {how}")
        elif not self._paused:
            with self._looking_away():
                self.values.append((tensor.data_ptr(), tensor.flatten().tolist()))

    def keep(self, memory: Any) -> None:
        super().keep(memory)
        start, _ = memory.buffer_info()
        # as it is before kernels write there
        if all(start != known for known, _ in self.words):
            self.words.append((start, memory.tobytes()))

    def keep_new(self, tensor: Tensor) -> None:
        super().keep_new(tensor)
        self.made.append((tensor.data_ptr(), tensor.untyped_storage().nbytes()))

    def workspace(self, nbytes: int) -> int:
        start = super().workspace(nbytes)
        self.scratches.append((start, nbytes))
        return start

    def watch(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if name == "lift_fresh":
            self.spoil("Python writes values")
        super().watch(name, args, kwargs, out)

    def paused(self) -> AbstractContextManager[None]:
        """Look on: what a check reads of one call says nothing of another."""
        return nullcontext()

    def plan(self, args: tuple[Any, ...], addresses: list[int], result: Any) -> Plan:
        """Tell addresses from numbers that stay."""
        if self.spoiled is not None:
            raise Unlike
        outs: list[tuple[torch.Size, torch.dtype]] = []
        starts: list[int] = []
        form = self._form(args, result, outs, starts)
        regions = [
            Region(start, start + nbytes, number, 0)
            for number, (start, nbytes) in enumerate(zip(addresses, extents(args), strict=True))
            if nbytes
        ]
        regions += [Region(start, start + dict(self.made)[start], len(addresses) + n, 0) for n, start in enumerate(starts)]
        # addresses of arguments and results first, then words, then whatever is not given to the caller
        first = offset = 8 * (len(addresses) + len(outs))
        for start, content in self.words:
            regions.append(Region(start, start + len(content), SPACE, offset))
            offset += len(content)
        offset = -(-offset // LINE) * LINE
        for start, nbytes in self.made:
            if start not in starts and nbytes:
                regions.append(Region(start, start + nbytes, SPACE, offset))
                offset += -(-nbytes // LINE) * LINE
        # each is needed until the next is asked for
        regions += [Region(start, start + nbytes, SPACE, offset) for start, nbytes in set(self.scratches)]
        offset += max((nbytes for _, nbytes in self.scratches), default=0)
        if offset > MOST_NBYTES:
            raise Unlike
        return Plan(len(addresses), outs, form, self._table(regions, first), offset)

    def _form(self, args: tuple[Any, ...], result: Any, outs: list[Any], starts: list[int]) -> Any:
        """A result as numbers of arguments and of new tensors, of which it fills lists."""
        if result is None:
            return None
        if type(result) is tuple:
            return [self._form(args, each, outs, starts) for each in result]
        if type(result) is not Tensor:
            raise Unlike
        for number, argument in enumerate(args):
            if result is argument:
                return "argument", number
        start = result.data_ptr()
        if start in starts or (start, result.nbytes) not in self.made or not result.is_contiguous() or not result.nbytes:
            raise Unlike
        outs.append((result.shape, result.dtype))
        starts.append(start)
        return "new", len(outs) - 1

    def _table(self, regions: list[Region], first: int) -> array:
        """Lay out what `play` reads."""
        moved: list[int] = []
        words = array("q", b"".join(content for _, content in self.words))
        for number, word in enumerate(words):
            if (where := _find(regions, word)) is not None:
                words[number] = 0
                moved += number, *where
        questions = [number for each in self.questions for number in (each[0], *self._inside(regions, each[1:3]), each[3])]
        launches = [number for each in self.launches for number in (each[0], *self._inside(regions, each[1:2]), each[2])]
        expected = [number for after, address in self.expected for number in (after, *self._inside(regions, (address,)))]
        values: list[int] = []
        for address, numbers in self.values:
            for number, value in enumerate(numbers):
                if (where := _find(regions, address + 4 * number)) is None or where[0] == SPACE:
                    raise Unlike
                values += *where, value
        sizes = (
            first,
            len(words),
            len(moved) // 3,
            len(values) // 3,
            len(self.questions),
            len(self.launches),
            len(self.expected),
        )
        return array("q", (*sizes, *words, *moved, *values, *questions, *launches, *expected))

    def _inside(self, regions: list[Region], addresses: tuple[int, ...]) -> list[int]:
        """Where in scratch memory these are."""
        found = [_find(regions, address) for address in addresses]
        if any(where is None or where[0] != SPACE for where in found):
            raise Unlike
        return [where[1] for where in found if where is not None]


def _find(regions: list[Region], word: int) -> tuple[int, int] | None:
    """Whose memory a number is an address of, and how far into it; None for one that is none."""
    within = [region for region in regions if region.start <= word < region.end]
    exact = [region for region in within if region.start == word]
    found = {(region.of, region.offset + word - region.start) for region in exact or within}
    if len(found) > 1:
        raise Unlike
    return next(iter(found), None)


def _rough(answer: int) -> int:
    """What matters of an answer: its number of bits, or that it is negative."""
    return answer if answer <= 0 else answer.bit_length()
