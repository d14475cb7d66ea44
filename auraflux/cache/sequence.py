"""One sequence: what it holds in each part of the cache, and the checkpoints it can fall back to."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from auraflux.cache.index import Note, StepIndex
from auraflux.errors import InputError


class Row(Protocol):
    """What one sequence holds in one part of the cache: pages of a group of layers, or a recurrent state."""

    stamp: int

    @property
    def parked(self) -> bool: ...
    @property
    def place(self) -> int | None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def plain_nbytes(self) -> int: ...
    def settle(self, length: int) -> None: ...
    def extend(self, length: int, new: int) -> None: ...
    def reaches(self, length: int) -> bool: ...
    def truncate(self, length: int) -> None: ...
    def shorten(self, length: int) -> None: ...
    def mark(self, length: int) -> Any: ...
    def rewind(self, length: int, mark: Any) -> None: ...
    def fork(self) -> "Row": ...
    def park(self) -> None: ...
    def snapshot(self) -> Any: ...
    def image_of(self, length: int, mark: Any) -> Any: ...
    def restore(self, image: Any) -> None: ...
    def close(self) -> None: ...


class Part(Hashable, Protocol):
    """A part of the cache, where each sequence has a row.

    holds  whether the layers that are being built have memory here
    note   hears what is done to it
    """

    holds: bool
    note: Note

    @property
    def reserved_nbytes(self) -> int: ...
    def settle(self) -> bool:
        """Return what no sequence will need again; tell whether there was any."""

    @property
    def free(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def filler(self) -> Any: ...
    def describe(self) -> str: ...
    def needs(self, steps: list[tuple[Any, int, int]]) -> int: ...
    def refresh(self, index: StepIndex, rows: list[Any]) -> None: ...
    def open(self) -> Any: ...


@dataclass(eq=False)
class Checkpoint:
    """What the parts that forget must keep to come back to a position; None for a part that does not forget."""

    position: int
    marks: dict[Part, Any]
    owners: int = 1

    @cached_property
    def nbytes(self) -> int:
        return sum(mark.nbytes for mark in self.marks.values() if mark is not None)


class Checkpoints:
    """The checkpoints of all sequences, that used longest ago first, within a budget.

    stride        tokens after which a sequence makes one by itself; None for never
    limit_nbytes  of all together; those used longest ago go first
    nbytes        of all together
    """

    def __init__(self, stride: int | None, limit_nbytes: int):
        self.stride, self.limit_nbytes, self.nbytes = stride, limit_nbytes, 0
        # there may be thousands, and every step asks
        self._kept: dict[Checkpoint, None] = {}

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._kept)

    def keep(self, checkpoint: Checkpoint) -> None:
        self._kept[checkpoint] = None
        self.nbytes += checkpoint.nbytes
        while self._kept and self.nbytes > self.limit_nbytes:
            self._drop(next(iter(self._kept)))

    def touch(self, checkpoint: Checkpoint) -> None:
        """Note that a checkpoint was of use."""
        del self._kept[checkpoint]
        self._kept[checkpoint] = None

    def disown(self, checkpoint: Checkpoint) -> None:
        """Drop a checkpoint unless another sequence still wants it."""
        checkpoint.owners -= 1
        if checkpoint.owners == 0 and self.has(checkpoint):
            self._drop(checkpoint)

    def has(self, checkpoint: Checkpoint) -> bool:
        return checkpoint in self._kept

    def make_room(self, part: Part) -> bool:
        """Drop the oldest checkpoint that holds pages of this part; tell whether there was one."""
        for checkpoint in self._kept:
            if checkpoint.marks[part] is not None:
                self._drop(checkpoint)
                return True
        return False

    def _drop(self, checkpoint: Checkpoint) -> None:
        del self._kept[checkpoint]
        self.nbytes -= checkpoint.nbytes
        for mark in checkpoint.marks.values():
            if mark is not None:
                mark.release()


@dataclass(frozen=True)
class Snapshot:
    """A copy of all that a sequence holds, for a cache of the same format. It owns no pages."""

    format: str
    length: int
    images: tuple[Any, ...]


class Sequence:
    """The tokens of one sequence in all layers."""

    def __init__(self, rows: dict[Part, Row], checkpoints: Checkpoints, format: str, length: int = 0):
        self.rows, self.length, self.format = rows, length, format
        self.closed = False
        self._store = checkpoints
        self._mine: list[Checkpoint] = []
        self._passed = length

    @property
    def nbytes(self) -> int:
        """Bytes of its pages and states; pages shared with others are counted in full."""
        return sum(row.nbytes for row in self.rows.values())

    @property
    def kept_nbytes(self) -> int:
        """Bytes of positions that are kept as they are beside their codes."""
        return sum(row.nbytes for row in self.rows.values() if row.plain_nbytes == 0)

    @property
    def plain_nbytes(self) -> int:
        """Bytes that the same positions and states would take with nothing compressed, in bf16."""
        return sum(row.plain_nbytes for row in self.rows.values())

    @property
    def checkpoints(self) -> list[int]:
        """Positions that it can come back to."""
        self._mine = [checkpoint for checkpoint in self._mine if self._store.has(checkpoint)]
        return [checkpoint.position for checkpoint in self._mine]

    def checkpoint(self, before: int = 0) -> None:
        """Keep what is needed to come back to the present length, or to so many tokens before. Call it between steps."""
        self.check_open()
        self._passed, position = self.length, self.length - before
        if position == 0 or position in self.checkpoints:
            return
        made = Checkpoint(position, {part: row.mark(position) for part, row in self.rows.items()})
        if any(mark is not None for mark in made.marks.values()):
            self._mine.append(made)
            self._store.keep(made)

    def drop_checkpoint(self, position: int) -> None:
        """Give up the checkpoint at a position, if there is one."""
        for checkpoint in [each for each in self._mine if each.position == position]:
            self._store.disown(checkpoint)
            self._mine.remove(checkpoint)

    def pass_stride(self) -> None:
        """Make a checkpoint if a multiple of the stride was reached since the last one."""
        stride = self._store.stride
        if stride is not None and self.length // stride > self._passed // stride:
            self.checkpoint()

    def truncate(self, length: int) -> int:
        """Forget the tokens from `length` on. Give how many of those before must be appended again.

        Usually none. Where a recurrent state or a window cannot go back so far, it is the distance to the checkpoint before
        `length`, or all, and `self.length` is where to begin.
        """
        self.check_open()
        if not 0 <= length <= self.length:
            raise InputError(f"a sequence of {self.length} tokens cannot be cut to {length}.")
        if length == self.length:
            return 0
        if not self._lost and all(row.reaches(length) for row in self.rows.values()):
            self._cut(length)
        else:
            self._fall_back(length)
        return length - self.length

    def shorten(self, extra: int) -> None:
        """Forget the extra tokens at the end of the last step, see `Batch`."""
        self.length -= extra
        for row in self.rows.values():
            row.shorten(self.length)

    def _fall_back(self, length: int) -> None:
        positions = [position for position in self.checkpoints if position <= length]
        if not positions:
            self._cut(0)
            return
        found = next(checkpoint for checkpoint in self._mine if checkpoint.position == max(positions))
        self._store.touch(found)
        for part, row in self.rows.items():
            row.rewind(found.position, found.marks[part])
        self._forget(found.position)

    def _cut(self, length: int) -> None:
        for row in self.rows.values():
            row.truncate(length)
        self._forget(length)

    def _forget(self, length: int) -> None:
        for checkpoint in self._mine:
            if checkpoint.position > length:
                self._store.disown(checkpoint)
        self._mine = [checkpoint for checkpoint in self._mine if checkpoint.position <= length]
        self.length, self._passed = length, min(self._passed, length)

    def fork(self) -> "Sequence":
        """Make another sequence with the same tokens. They share pages until one of them writes."""
        self.check_open()
        other = Sequence({part: row.fork() for part, row in self.rows.items()}, self._store, self.format, self.length)
        other._mine, other._passed = list(self._mine), self._passed
        for checkpoint in self._mine:
            checkpoint.owners += 1
        return other

    def park(self) -> None:
        """Keep the tokens, but nothing that only a running sequence needs: from now on it can only be branched and cut."""
        self.checkpoint()
        for row in self.rows.values():
            row.park()

    def reach(self, length: int) -> int:
        """The length that `branch` or `truncate` would come to."""
        if not self._lost and (length == self.length or all(row.reaches(length) for row in self.rows.values())):
            return length
        return max((position for position in self.checkpoints if position <= length), default=0)

    @property
    def _lost(self) -> bool:
        """Whether some of what it held is only in checkpoints."""
        return any(row.parked for row in self.rows.values())

    def branch(self, length: int) -> "Sequence":
        """Make another sequence that begins with as many of the first `length` tokens as can be had."""
        other = self.fork()
        if self._lost:
            other._fall_back(length)
        else:
            other.truncate(length)
        return other

    def snapshot(self) -> Snapshot:
        """Copy everything it holds; `Cache.restore` makes a sequence of it. Of a parked one, as far as checkpoints reach."""
        self.check_open()
        if not self._lost:
            return Snapshot(self.format, self.length, tuple(row.snapshot() for row in self.rows.values()))
        found = max((c for c in self._mine if self._store.has(c)), key=lambda c: c.position, default=None)
        if found is None:
            raise InputError("a parked sequence whose checkpoints are gone cannot be copied.")
        images = tuple(row.image_of(found.position, found.marks[part]) for part, row in self.rows.items())
        return Snapshot(self.format, found.position, images)

    def close(self) -> None:
        """Give back all it holds. Closing twice does nothing."""
        if not self.closed:
            self._forget(-1)
            for row in self.rows.values():
                row.close()
            self.length, self.closed = 0, True

    def check_open(self) -> None:
        if self.closed:
            raise InputError("the sequence is closed.")
