"""`Group`: the processes of one model, numbered from 0, and messages between them.

Tensors go through a gloo process group, notes as JSON in front of them; what GPUs of one machine give each other goes through
NCCL. Nothing waits for a rank that is gone: every wait ends
when the heart, a thread that looks after the others, has not seen one of them for a while.
"""

import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Semaphore, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from auraflux.errors import RankError
from auraflux.run.ranks.devices import device_group
from auraflux.run.ranks.heart import Heart, Key
from auraflux.run.ranks.members import ROWS, Members
from auraflux.run.ranks.mesh import Mesh
from auraflux.run.ranks.wire import Wire

# torch's stubs know little of it
GLOO: Any = getattr(dist, "ProcessGroupGloo", None)
LOOK_S = 0.2  # between two looks at the heart
FOREVER = timedelta(days=30)  # the heart ends waits, not gloo
UNDER_WAY = 8  # sends that are not waited for
STAMP = struct.Struct("<d")  # before what goes over a pretended wire: when it arrives
JOIN_S = 600.0  # in which all ranks must have come
ABORT_S = 5.0  # after which NCCL ends by itself


@dataclass(frozen=True)
class Place:
    """Where ranks meet, and the address that this one is reached at."""

    host: str
    port: int
    address: str

    def store(self, timeout_s: float) -> Any:
        """A connection to where ranks meet."""
        try:
            found = dist.TCPStore(
                self.host, self.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
            )
        except (dist.DistError, RuntimeError) as err:
            raise RankError(f"nobody answers at {self.host}:{self.port}. Is rank 0 there, and the address right?") from err
        # torchrun's own place outlives ranks that it starts again, who must not find groups of those before them
        return dist.PrefixStore(f"auraflux/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", found)


def meeting_place(host: str, port: int) -> tuple[Place, Any]:
    """Listen at one address, and nowhere else, for ranks to meet at."""
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as err:
        raise RankError(f"ranks cannot meet at {host}:{port}: {err.strerror or err}.") from err
    port = listening.getsockname()[1]
    # the store closes it
    server = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    return Place(host, port, host), server


def address_towards(host: str, port: int) -> str:
    """This machine's address on the network that another is on."""
    try:
        with socket.create_connection((host, port), timeout=10) as connection:
            return connection.getsockname()[0]
    except OSError as err:
        raise RankError(
            f"nobody answers at {host}:{port}: {err.strerror or err}. Is rank 0 there, and the address right?"
        ) from err


@dataclass
class Tally:
    """What a rank has sent, and how long it has waited for the others, at work or on their way."""

    nbytes: int = 0
    waited_s: float = 0.0


class Group(Members):
    """Ranks that have found each other.

    lost      why the group is of no use any more; None while it is
    captured  whether what ranks of a stage give each other can be part of a CUDA graph
    """

    captured = False

    def __init__(self, place: Place, number: int, rank: int, size: int, timeout_s: float, wire: Wire | None = None):
        self.rank, self.size, self.number, self._wire = rank, size, number, wire or Wire()
        self._key: Key = f"{number}/{{}}".format
        options = GLOO._Options()
        options._devices = [GLOO.create_device(hostname=place.address)]
        options._timeout = timedelta(seconds=JOIN_S)
        meeting = place.store(JOIN_S)
        try:
            self._gloo = GLOO(dist.PrefixStore(self._key("gloo"), meeting), rank, size, options)
        except RuntimeError as err:
            raise RankError(f"the {size} ranks have not found each other within {JOIN_S:.0f} s.") from err
        self.lost: str | None = None
        self._meeting, self.devices = meeting, None
        self._heart = Heart(place, self._key, rank, size, timeout_s, self._abort)
        self._waiter, self._sends = Waiter(), Sends(self.check)
        self.tally = Tally()

    def send(self, tensor: Tensor, to: int, tag: int = ROWS, latent: bool = True) -> None:
        """Begin to send a tensor, which must not change any more; that of a GPU goes through main memory."""
        self.check()
        tensor = tensor.cpu()
        self.tally.nbytes += tensor.nbytes
        if self._wire.pretended:
            tensor = _stamped(tensor, self._wire.due(tensor.nbytes, latent))
        try:
            self._sends.make_room()
            self._sends.add(self._gloo.send([tensor], to, tag), tensor)
        except RankError:
            raise
        except RuntimeError as err:
            raise self._gone(err) from err

    def expect(self, *shape: int, source: int, dtype: torch.dtype = torch.float32, tag: int = ROWS) -> "Expected":
        """Say that a tensor will come; who does so early need not wait for the other side to ask."""
        self.check()
        tensor = torch.empty(*shape, dtype=dtype)
        room = torch.empty(STAMP.size + tensor.nbytes, dtype=torch.uint8) if self._wire.pretended else tensor
        try:
            return Expected(self, self._gloo.recv([room], source, tag), tensor, room, self._wire)
        except RuntimeError as err:
            raise self._gone(err) from err

    def wait(self, work: Any) -> None:
        """Wait for what was asked for, and count the time."""
        began = time.perf_counter()
        try:
            self._sends.hand_over()
            self._waiter.wait(work, self.check)
            self.tally.waited_s += time.perf_counter() - began
        except RankError:
            raise
        except RuntimeError as err:
            raise self._gone(err) from err

    def check(self) -> None:
        """Raise if a rank is gone."""
        self.lost = self.lost or self._heart.lost
        if self.lost is not None:
            raise RankError(self.lost)

    def break_up(self, why: str) -> None:
        """Make the group of no use to anybody: the others notice that this heart has stopped."""
        self.lost = self.lost or why
        self._heart.stop()

    def open_devices(self, mesh: Mesh) -> None:
        """Let GPUs of a stage give each other what they have; every rank calls it, with its own GPU as the current one."""
        store = dist.PrefixStore(self._key(f"nccl/{mesh.stage(self.rank)}"), self._meeting)
        self.devices = device_group(store, mesh.place(self.rank), mesh.width, JOIN_S)
        self.captured = True

    def _abort(self) -> None:
        """End what GPUs wait for: their kernels would wait for ever."""
        devices, self.devices = self.devices, None
        if devices is not None:
            # kernels end at once, but NCCL itself only when no CUDA graph has its calls any more
            thread = Thread(target=_give_up, args=(devices,), name="auraflux-abort", daemon=True)
            thread.start()
            thread.join(ABORT_S)

    def fail(self, why: str) -> None:
        """Leave word why this rank will be gone."""
        self._heart.tell(why)

    def _gone(self, err: RuntimeError) -> RankError:
        """What is known of a connection that broke."""
        self.lost = self.lost or self._heart.word() or "a rank is gone: its connection was closed."
        return RankError(self.lost)

    def close(self) -> None:
        """Let go of the other ranks, when what was sent to them is on its way."""
        with suppress(RankError, RuntimeError):
            if self.lost is None:
                self._sends.finish()
        self.lost = self.lost or "the group was closed."
        self._heart.stop()
        self._waiter.stop()
        self._sends.stop()
        self._abort()


def _give_up(devices: Any) -> None:
    # it says so when it has waited too long
    with suppress(RuntimeError):
        devices.abort()


class Waiter:
    """Waits for gloo on a thread of its own: what never comes must not hold up who asked for it, nor the end of the process."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[Any] = SimpleQueue()
        self._done: SimpleQueue[tuple[Any, RuntimeError | None]] = SimpleQueue()
        Thread(target=self._run, name="auraflux-waiter", daemon=True).start()

    def wait(self, work: Any, look: Callable[[], None]) -> None:
        """Wait for a transfer; `look` is called now and then, and may raise."""
        self._asked.put(work)
        while True:
            try:
                done, failure = self._done.get(timeout=LOOK_S)
            except Empty:
                look()
                continue
            # what nobody waits for any more, since it was interrupted, comes too
            if done is work:
                if failure is not None:
                    raise failure
                return

    def stop(self) -> None:
        self._asked.put(None)

    def _run(self) -> None:
        while (work := self._asked.get()) is not None:
            try:
                work.wait(FOREVER)
                self._done.put((work, None))
            except RuntimeError as err:
                self._done.put((work, err))


class Sends:
    """Waits for what is sent on a thread of its own: its memory is needed until then, and who sent it has other things to do.

    That thread is told of sends when there is nothing else to do, or when there are many: to wake it takes time.

    look  is called now and then by who waits for room, and may raise
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._given: SimpleQueue[list[tuple[Any, Tensor]] | None] = SimpleQueue()
        self._fresh: list[tuple[Any, Tensor]] = []
        self._room, self._look = Semaphore(UNDER_WAY), look
        self._failure: RuntimeError | None = None
        Thread(target=self._run, name="auraflux-sends", daemon=True).start()

    def make_room(self) -> None:
        """Wait until one more may be under way; RuntimeError if one of them failed."""
        if len(self._fresh) >= UNDER_WAY // 2:
            self.hand_over()
        while not self._room.acquire(timeout=LOOK_S):
            self._look()
        if self._failure is not None:
            raise self._failure

    def add(self, work: Any, tensor: Tensor) -> None:
        self._fresh.append((work, tensor))

    def hand_over(self) -> None:
        if self._fresh:
            fresh, self._fresh = self._fresh, []
            self._given.put(fresh)

    def finish(self) -> None:
        """Wait until all are on their way."""
        self.hand_over()
        for _ in range(UNDER_WAY):
            self.make_room()

    def stop(self) -> None:
        self._given.put(None)

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            for work, _ in given:
                try:
                    work.wait(FOREVER)
                except RuntimeError as err:
                    self._failure = err
                self._room.release()


def _stamped(tensor: Tensor, due: float) -> Tensor:
    stamp = torch.frombuffer(bytearray(STAMP.pack(due)), dtype=torch.uint8)
    return torch.cat([stamp, tensor.contiguous().view(torch.uint8).flatten()])


class Expected:
    """A tensor on its way, to memory that has room for when it arrives, too, where the wire is pretended."""

    def __init__(self, group: Group, work: Any, tensor: Tensor, room: Tensor, wire: Wire):
        self._group, self._work, self._tensor, self._room, self._wire = group, work, tensor, room, wire

    def wait(self, length: int | None = None) -> Tensor:
        """What has come; `length` of it where less was sent than there is room for."""
        self._group.wait(self._work)
        found = self._tensor[:length]
        if not self._wire.pretended:
            return found
        (due,) = STAMP.unpack(self._room[: STAMP.size].numpy().tobytes())
        self._wire.arrive(found.nbytes, due)
        return self._room[STAMP.size :].view(self._tensor.dtype).view(self._tensor.shape)[:length]
