"""Collectives over point-to-point transfers: JSON messages, all-gather, all-to-all and all-reduce.

A `Group` implements sending and receiving; a `Subgroup` has some of its ranks, numbered from 0.
"""

import ctypes
import json
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from auraflux.distributed.comm.devices import nccl_all_gather
from auraflux.errors import RankError

MESSAGE_NBYTES = 4096  # the rest of a longer one follows as a tensor
LENGTH = struct.Struct("<q")
POSTED = 2  # receives of messages that are posted ahead
ROWS, MESSAGES, REPLIES = 0, 1, 2  # tags


class PendingTensor(Protocol):
    """A tensor whose receive is posted."""

    def wait(self, length: int | None = None) -> Tensor:
        """Wait for the tensor and return it, or its first `length` elements where fewer were sent."""


def tensor_at(memory: Tensor, start: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Copy a tensor out of a byte buffer, from the byte `start` on."""
    found = torch.empty(*shape, dtype=dtype)
    if start + found.nbytes > memory.nbytes:
        raise RankError(f"expected {found.nbytes} bytes of hidden states, received {memory.nbytes - start}.")
    ctypes.memmove(found.data_ptr(), memory.data_ptr() + start, found.nbytes)
    return found


class Collectives:
    """Communication between the ranks of a group.

    number   of the group; a restarted group has another
    devices  NCCL process group of the ranks' GPUs, see `devices.py`; None without one
    """

    rank: int
    size: int
    number: int
    devices: Any

    def send(self, tensor: Tensor, to: int, tag: int = ROWS, latent: bool = True) -> None:
        """Start to send a tensor, which must not change any more; `latent` adds the latency of a simulated link."""
        raise NotImplementedError

    def post_receive(self, *shape: int, source: int, dtype: torch.dtype = torch.float32, tag: int = ROWS) -> PendingTensor:
        """Post a receive; posted early, it spares the sender a round trip."""
        raise NotImplementedError

    def receive(self, *shape: int, source: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Receive a tensor."""
        return self.post_receive(*shape, source=source, dtype=dtype).wait()

    def send_message(self, message: dict[str, Any], to: int) -> None:
        """Send a JSON message."""
        text = json.dumps(message, separators=(",", ":")).encode()
        room = MESSAGE_NBYTES - LENGTH.size
        # the tensor that follows carries the latency
        self.send(_byte_tensor(LENGTH.pack(len(text)) + text[:room]), to, MESSAGES, latent=False)
        if len(text) > room:
            self.send(_byte_tensor(text[room:]), to)

    def broadcast_message(self, message: dict[str, Any]) -> None:
        """Send a message to all ranks from rank 0."""
        for other in range(1, self.size):
            self.send_message(message, other)

    def receive_message(self, source: int) -> dict[str, Any]:
        """Wait for a message."""
        return self._parse(self._post_message(source), source)

    def messages(self, source: int) -> Iterator[dict[str, Any]]:
        """Yield all messages from a rank.

        Posting a receive takes a message itself. So the next receive is posted before a message is handled, and the one after
        it when that is done, off the critical path.
        """
        posted = deque(self._post_message(source) for _ in range(POSTED))
        while True:
            yield self._parse(posted.popleft(), source)
            posted.append(self._post_message(source))

    def _parse(self, message: PendingTensor, source: int) -> dict[str, Any]:
        found = message.wait()
        # reading memory directly is faster than through torch
        (length,) = LENGTH.unpack(ctypes.string_at(found.data_ptr(), LENGTH.size))
        here = min(length, MESSAGE_NBYTES - LENGTH.size)
        text = ctypes.string_at(found.data_ptr() + LENGTH.size, here)
        if length > here:
            text += bytes(self.receive(length - here, source=source, dtype=torch.uint8).numpy())
        return json.loads(text)

    def _post_message(self, source: int) -> PendingTensor:
        return self.post_receive(MESSAGE_NBYTES, source=source, dtype=torch.uint8, tag=MESSAGES)

    def all_gather(self, mine: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in rank order; all have the same shape."""
        if mine.is_cuda:
            if self.devices is not None:
                return nccl_all_gather(self.devices, mine, self.size)
            return [each.to(mine.device) for each in self.all_gather(mine.cpu())]
        others = [rank for rank in range(self.size) if rank != self.rank]
        pending = {rank: self.post_receive(*mine.shape, source=rank, dtype=mine.dtype) for rank in others}
        for rank in others:
            self.send(mine, rank)
        return [mine if rank == self.rank else pending[rank].wait() for rank in range(self.size)]

    def all_to_all(self, mine: Sequence[Tensor], nbytes: Sequence[int], most: int) -> list[Tensor]:
        """Exchange bytes with all ranks; return those for this rank, in rank order.

        mine    bytes for each rank
        nbytes  that each rank sends to this one
        most    that any rank sends; gloo ends the process when a message exceeds its buffer
        """
        others = [rank for rank in range(self.size) if rank != self.rank]
        pending = {rank: self.post_receive(most, source=rank, dtype=torch.uint8) for rank in others}
        for rank in others:
            self.send(mine[rank], rank)
        return [mine[rank] if rank == self.rank else pending[rank].wait(nbytes[rank]) for rank in range(self.size)]

    def all_reduce(self, mine: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks, added in rank order: [T, H]."""
        total, *rest = self.all_gather(mine)
        for other in rest:
            total = total + other
        return total


class Subgroup(Collectives):
    """Some ranks of a group, numbered from 0 in their order."""

    def __init__(self, group: Collectives, ranks: Sequence[int]):
        self._group, self._ranks = group, ranks
        self.rank, self.size, self.number = ranks.index(group.rank), len(ranks), group.number
        self.devices = group.devices

    def send(self, tensor: Tensor, to: int, tag: int = ROWS, latent: bool = True) -> None:
        self._group.send(tensor, self._ranks[to], tag, latent)

    def post_receive(self, *shape: int, source: int, dtype: torch.dtype = torch.float32, tag: int = ROWS) -> PendingTensor:
        return self._group.post_receive(*shape, source=self._ranks[source], dtype=dtype, tag=tag)


def _byte_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
