"""What ranks that know each other can say: notes as JSON, and tensors that all give and all get.

`Members` does so by sending and expecting single tensors; a group can do that, and a part of one, whose ranks have numbers of
their own.
"""

import ctypes
import json
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from auraflux.errors import RankError
from auraflux.run.ranks.devices import gathered

NOTE_NBYTES = 4096  # what is longer follows in a message of its own
LENGTH = struct.Struct("<q")
ASKED = 2  # notes that are asked for before they come
ROWS, NOTES, ANSWERS = 0, 1, 2  # tags


class Coming(Protocol):
    """A tensor on its way."""

    def wait(self, length: int | None = None) -> Tensor:
        """What has come; `length` of it where less was sent than there is room for."""


def copied(memory: Tensor, start: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor whose numbers stand in memory from a byte on."""
    found = torch.empty(*shape, dtype=dtype)
    if start + found.nbytes > memory.nbytes:
        raise RankError(f"{found.nbytes} bytes of rows were to come, and there are {memory.nbytes - start}.")
    ctypes.memmove(found.data_ptr(), memory.data_ptr() + start, found.nbytes)
    return found


class Members:
    """Ranks that talk to each other.

    number   of the group; one that comes back is another
    devices  through which their GPUs reach each other, see `devices.py`; None where they do not
    """

    rank: int
    size: int
    number: int
    devices: Any

    def send(self, tensor: Tensor, to: int, tag: int = ROWS, latent: bool = True) -> None:
        """Begin to send a tensor, which must not change any more; `latent` unless others that follow take as long."""
        raise NotImplementedError

    def expect(self, *shape: int, source: int, dtype: torch.dtype = torch.float32, tag: int = ROWS) -> Coming:
        """Say that a tensor will come; who does so early need not wait for the other side to ask."""
        raise NotImplementedError

    def receive(self, *shape: int, source: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.expect(*shape, source=source, dtype=dtype).wait()

    def say(self, told: dict[str, Any], to: int) -> None:
        """Send a note."""
        text = json.dumps(told, separators=(",", ":")).encode()
        room = NOTE_NBYTES - LENGTH.size
        # what comes after it takes as long
        self.send(_octets(LENGTH.pack(len(text)) + text[:room]), to, NOTES, latent=False)
        if len(text) > room:
            self.send(_octets(text[room:]), to)

    def say_all(self, told: dict[str, Any]) -> None:
        for other in range(1, self.size):
            self.say(told, other)

    def hear(self, source: int) -> dict[str, Any]:
        """Wait for a note."""
        return self._read(self._note(source), source)

    def notes(self, source: int) -> Iterator[dict[str, Any]]:
        """All notes from a rank.

        To ask for one is a message, too. So the next is asked for before one is worked on, and that after it when the work is
        done, which nobody waits for then.
        """
        asked = deque(self._note(source) for _ in range(ASKED))
        while True:
            yield self._read(asked.popleft(), source)
            asked.append(self._note(source))

    def _read(self, note: Coming, source: int) -> dict[str, Any]:
        found = note.wait()
        # what is looked at without torch takes less time
        (length,) = LENGTH.unpack(ctypes.string_at(found.data_ptr(), LENGTH.size))
        here = min(length, NOTE_NBYTES - LENGTH.size)
        text = ctypes.string_at(found.data_ptr() + LENGTH.size, here)
        if length > here:
            text += bytes(self.receive(length - here, source=source, dtype=torch.uint8).numpy())
        return json.loads(text)

    def _note(self, source: int) -> Coming:
        return self.expect(NOTE_NBYTES, source=source, dtype=torch.uint8, tag=NOTES)

    def exchange(self, mine: Tensor) -> list[Tensor]:
        """What all ranks give, in their order; each gives a tensor of the same shape."""
        if mine.is_cuda:
            if self.devices is not None:
                return gathered(self.devices, mine, self.size)
            return [each.to(mine.device) for each in self.exchange(mine.cpu())]
        others = [rank for rank in range(self.size) if rank != self.rank]
        coming = {rank: self.expect(*mine.shape, source=rank, dtype=mine.dtype) for rank in others}
        for rank in others:
            self.send(mine, rank)
        return [mine if rank == self.rank else coming[rank].wait() for rank in range(self.size)]

    def swap(self, mine: Sequence[Tensor], nbytes: Sequence[int], most: int) -> list[Tensor]:
        """Octets that all ranks give to this one, so many each, in their order.

        mine  what this rank gives to each
        most  that any gives; gloo ends the process when more comes than there is room for
        """
        others = [rank for rank in range(self.size) if rank != self.rank]
        coming = {rank: self.expect(most, source=rank, dtype=torch.uint8) for rank in others}
        for rank in others:
            self.send(mine[rank], rank)
        return [mine[rank] if rank == self.rank else coming[rank].wait(nbytes[rank]) for rank in range(self.size)]

    def add_up(self, mine: Tensor) -> Tensor:
        """The sum of what all ranks give, added in their order: [T, H]."""
        total, *rest = self.exchange(mine)
        for part in rest:
            total = total + part
        return total


class Part(Members):
    """Some ranks of a group, numbered from 0 in their order."""

    def __init__(self, group: Members, ranks: Sequence[int]):
        self._group, self._ranks = group, ranks
        self.rank, self.size, self.number = ranks.index(group.rank), len(ranks), group.number
        self.devices = group.devices

    def send(self, tensor: Tensor, to: int, tag: int = ROWS, latent: bool = True) -> None:
        self._group.send(tensor, self._ranks[to], tag, latent)

    def expect(self, *shape: int, source: int, dtype: torch.dtype = torch.float32, tag: int = ROWS) -> Coming:
        return self._group.expect(*shape, source=self._ranks[source], dtype=dtype, tag=tag)


def _octets(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
