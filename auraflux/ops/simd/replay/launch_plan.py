"""A launch plan: the kernel launches of one op call with relocatable addresses, made from a recording of the call.

A plan names every address by its owner and an offset. Owners are numbered: arguments first, then new tensors of the result;
scratch memory is SPACE. All other numbers are constants of the plan.
"""

import struct
import weakref
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from auraflux.ops.simd.jit import REUSED_FROM, empty
from auraflux.ops.simd.replay.call_signature import Uncacheable, spans
from auraflux.ops.simd.replay.record import Recording
from auraflux.ops.simd.threads import LINE

MAX_NBYTES = 1 << 24  # of scratch memory: a call that needs more takes so long that its Python does not matter
MAX_VALUES = 64  # that Python may read of one tensor
SPACE = -1

Form = Any  # of a result: None, a position in the arguments followed by the new tensors, or a list of forms


class Region(NamedTuple):
    """Memory that kernels address: its owner, and its offset there."""

    start: int
    end: int
    owner: int
    offset: int


class LaunchPlan:
    """The launches of a call with relocatable addresses.

    outs      shape and dtype of each new tensor of the result
    form      of the result
    table     the input of `call_cache.replay`
    nbytes    of scratch memory
    pins      the arguments holding tensors that all calls so far shared, by position. Constants of the plan may be addresses of
              data derived from them, so the plan serves only calls that share them too
    trusted   a second call gave the same plan
    tries     recordings of calls of this signature whose plans differed
    """

    def __init__(self, arguments: int, outs: list[tuple[torch.Size, torch.dtype]], form: Form, table: array, nbytes: int):
        self.content = outs, form, table, nbytes
        self.form, self.nbytes = form, nbytes
        self.table_at = table.buffer_info()[0]
        self.pins: dict[int, weakref.ref[Any]] = {}
        self.trusted, self.tries = False, 1
        self.make = [_maker(*each) for each in outs]
        self.write = struct.Struct(f"{arguments + len(outs)}q").pack_into


def _maker(shape: torch.Size, dtype: torch.dtype) -> Callable[[], Tensor]:
    if dtype is not torch.float32:
        return partial(torch.empty, *shape, dtype=dtype)
    # naming a dtype takes half a microsecond
    return partial(torch.empty if 4 * shape.numel() < REUSED_FROM else empty, *shape)


class CallRecording(Recording):
    """The launches of one call, and the memory they use.

    launches   code, address of its arguments, jobs
    queries    code, address of its arguments, address of its answer, rough answer
    expected   launches before, address of a number that is 0 unless a kernel was given bad input
    values     address and contents of integers that Python read
    words      address and content of the kernels' arguments
    made       address and bytes of new tensors; scratches  of scratch memory
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[int, int, int]] = []
        self.queries: list[tuple[int, int, int, int]] = []
        self.expected: list[tuple[int, int]] = []
        self.values: list[tuple[int, list[int]]] = []
        self.words: dict[int, bytes] = {}
        self.made: dict[int, int] = {}
        self.scratches: list[tuple[int, int]] = []

    def add(self, code: int, args: array, jobs: int) -> None:
        self.retain(args)
        self.launches.append((code, args.buffer_info()[0], jobs))

    def add_query(self, code: int, args: array) -> None:
        self.retain(args)
        start = args.buffer_info()[0]
        self.queries.append((code, start, start + 8 * (len(args) - 1), _rough(args[-1])))

    def checks_error_flag(self, address: int) -> bool:
        self.expected.append((len(self.launches), address))
        return True

    def read(self, how: str, tensor: Tensor) -> None:
        """Record a few integers, such as sequence starts: the plan serves only calls with the same values."""
        if how != "tolist" or tensor.dtype is not torch.int32 or tensor.numel() > MAX_VALUES or not tensor.is_contiguous():
            self.reject(f"Python reads a value with {how}")
        elif not self._paused:
            with self._suspended():
                self.values.append((tensor.data_ptr(), tensor.flatten().tolist()))

    def retain(self, memory: Any) -> None:
        super().retain(memory)
        # the first content: kernels may write there later
        self.words.setdefault(memory.buffer_info()[0], memory.tobytes())

    def retain_new(self, tensor: Tensor) -> None:
        super().retain_new(tensor)
        self.made[tensor.data_ptr()] = tensor.untyped_storage().nbytes()

    def workspace(self, nbytes: int) -> int:
        start = super().workspace(nbytes)
        self.scratches.append((start, nbytes))
        return start

    def watch(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if name == "lift_fresh":
            self.reject("Python writes values")
        super().watch(name, args, kwargs, out)

    def paused(self) -> AbstractContextManager[None]:
        """Continue recording: values that a check reads in one call may differ in another."""
        return nullcontext()

    def plan(self, args: tuple[Any, ...], addresses: list[int], result: Any) -> LaunchPlan:
        """Replace addresses by owners and offsets."""
        if self.rejected is not None:
            raise Uncacheable
        new: list[Tensor] = []
        form = self._form(args, result, new)
        owned = [*zip(addresses, spans(args), strict=True), *((out.data_ptr(), self.made[out.data_ptr()]) for out in new)]
        regions = [Region(start, start + nbytes, owner, 0) for owner, (start, nbytes) in enumerate(owned) if nbytes]
        # scratch memory begins with the addresses of owners; words follow, then new tensors that stay inside the call
        first = offset = 8 * len(owned)
        for start, content in self.words.items():
            regions.append(Region(start, start + len(content), SPACE, offset))
            offset += len(content)
        offset = _aligned(offset)
        given = {out.data_ptr() for out in new}
        for start, nbytes in self.made.items():
            if start not in given and nbytes:
                regions.append(Region(start, start + nbytes, SPACE, offset))
                offset += _aligned(nbytes)
        # workspaces share their memory: each is valid until the next is requested
        regions += [Region(start, start + nbytes, SPACE, offset) for start, nbytes in set(self.scratches)]
        offset += max((nbytes for _, nbytes in self.scratches), default=0)
        if offset > MAX_NBYTES:
            raise Uncacheable
        return LaunchPlan(len(addresses), [(out.shape, out.dtype) for out in new], form, self._table(regions, first), offset)

    def _form(self, args: tuple[Any, ...], result: Any, new: list[Tensor]) -> Form:
        """Describe a result by positions in the arguments and the new tensors, which it collects."""
        if result is None:
            return None
        if type(result) is tuple:
            return [self._form(args, each, new) for each in result]
        if type(result) is not Tensor:
            raise Uncacheable
        for position, argument in enumerate(args):
            if result is argument:
                return position
        start = result.data_ptr()
        is_known = any(start == other.data_ptr() for other in new)
        if is_known or self.made.get(start) != result.nbytes or not result.is_contiguous() or not result.nbytes:
            raise Uncacheable
        new.append(result)
        return len(args) + len(new) - 1

    def _table(self, regions: list[Region], first: int) -> array:
        """Lay out the input of `call_cache.replay`."""
        words = array("q", b"".join(self.words.values()))
        moved: list[tuple[int, ...]] = []
        for number, word in enumerate(words):
            if (place := _find(regions, word)) is not None:
                words[number] = 0
                moved.append((number, *place))

        def inside(address: int) -> int:
            place = _find(regions, address)
            if place is None or place[0] != SPACE:
                raise Uncacheable
            return place[1]

        values = list(self._values(regions))
        queries = [(code, inside(args), inside(answer), rough) for code, args, answer, rough in self.queries]
        launches = [(code, inside(args), jobs) for code, args, jobs in self.launches]
        expected = [(before, inside(address)) for before, address in self.expected]
        parts: tuple[list[Any], ...] = moved, values, queries, launches, expected
        return array("q", (first, len(words), *map(len, parts), *words, *chain(*chain(*parts))))

    def _values(self, regions: list[Region]) -> Iterator[tuple[int, int, int]]:
        """Iterate over owner, offset and value of the numbers that Python read."""
        for address, numbers in self.values:
            for number, value in enumerate(numbers):
                place = _find(regions, address + 4 * number)
                if place is None or place[0] == SPACE:
                    raise Uncacheable
                yield *place, value


def _find(regions: list[Region], word: int) -> tuple[int, int] | None:
    """Find the owner and offset of an address; None for a number that is no address."""
    within = [region for region in regions if region.start <= word < region.end]
    exact = [region for region in within if region.start == word]
    found = {(region.owner, region.offset + word - region.start) for region in exact or within}
    if len(found) > 1:
        raise Uncacheable
    return next(iter(found), None)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


def _rough(answer: int) -> int:
    """Reduce an answer to its number of bits, or to its value where that is not positive."""
    return answer if answer <= 0 else answer.bit_length()
