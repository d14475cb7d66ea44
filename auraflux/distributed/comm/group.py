"""`Group`: the ranks of one model, and transfers between them.

Tensors and JSON messages go through a gloo process group; collectives between GPUs of one machine go through NCCL. Every wait
ends when the heartbeat reports a lost rank.
"""

import os
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from auraflux.distributed.comm.collectives import ROWS, Collectives
from auraflux.distributed.comm.devices import device_group
from auraflux.distributed.comm.heartbeat import Heartbeat, Key
from auraflux.distributed.comm.mesh import Mesh
from auraflux.distributed.comm.slow_link import SimulatedLink
from auraflux.distributed.comm.transfer_threads import ReceiveWaiter, SendQueue
from auraflux.errors import RankError

# torch's type stubs omit it
GLOO: Any = getattr(dist, "ProcessGroupGloo", None)
STAMP = struct.Struct("<d")  # arrival time, in front of a message on a simulated link
JOIN_S = 600.0  # in which all ranks must join
ABORT_S = 5.0  # for NCCL to abort
HEARTBEAT_END_S = 1.0  # for its thread to end


@dataclass(frozen=True)
class Endpoint:
    """Address of the rendezvous, and the address at which this rank is reached."""

    host: str
    port: int
    address: str

    def store(self, timeout_s: float) -> Any:
        """Connect to the rendezvous store."""
        try:
            found = dist.TCPStore(
                self.host, self.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
            )
        except (dist.DistError, RuntimeError) as err:
            raise RankError(f"no answer at {self.host}:{self.port}. Is rank 0 running, and the address right?") from err
        # torchrun's store outlives restarts of its ranks, which must not find the groups of earlier ones
        return dist.PrefixStore(f"auraflux/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", found)


def open_rendezvous(host: str, port: int) -> tuple[Endpoint, Any]:
    """Open the rendezvous store at one address only."""
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as err:
        raise RankError(f"cannot open the rendezvous at {host}:{port}: {err.strerror or err}.") from err
    port = listening.getsockname()[1]
    # the store closes it
    server = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    return Endpoint(host, port, host), server


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the network of another."""
    try:
        with socket.create_connection((host, port), timeout=10) as connection:
            return connection.getsockname()[0]
    except OSError as err:
        raise RankError(
            f"no answer at {host}:{port}: {err.strerror or err}. Is rank 0 running, and the address right?"
        ) from err


@dataclass
class TransferStats:
    """Bytes sent by a rank, and its waiting time for the others, their computation included."""

    nbytes: int = 0
    waited_s: float = 0.0


class Group(Collectives):
    """Connected ranks.

    lost        reason why the group is unusable; None while it is usable
    capturable  collectives of a stage can be captured in a CUDA graph
    """

    capturable = False

    def __init__(
        self, endpoint: Endpoint, number: int, rank: int, size: int, timeout_s: float, link: SimulatedLink | None = None
    ):
        self.rank, self.size, self.number, self._link = rank, size, number, link or SimulatedLink()
        self._key: Key = f"{number}/{{}}".format
        options = GLOO._Options()
        options._devices = [GLOO.create_device(hostname=endpoint.address)]
        options._timeout = timedelta(seconds=JOIN_S)
        store = endpoint.store(JOIN_S)
        try:
            self._gloo = GLOO(dist.PrefixStore(self._key("gloo"), store), rank, size, options)
        except RuntimeError as err:
            raise RankError(f"the {size} ranks did not connect within {JOIN_S:.0f} s.") from err
        self.lost: str | None = None
        self._store, self.devices = store, None
        self._heartbeat = Heartbeat(endpoint, self._key, rank, size, timeout_s, self._abort_nccl)
        self._receives, self._sends = ReceiveWaiter(), SendQueue(self.check)
        self.transfers = TransferStats()

    def send(self, tensor: Tensor, to: int, tag: int = ROWS, latent: bool = True) -> None:
        """Start to send a tensor, which must not change any more; a GPU tensor goes through host memory."""
        self.check()
        tensor = tensor.cpu()
        self.transfers.nbytes += tensor.nbytes
        if self._link.simulated:
            tensor = _stamped(tensor, self._link.due(tensor.nbytes, latent))
        try:
            self._sends.reserve()
            self._sends.add(self._gloo.send([tensor], to, tag), tensor)
        except RankError:
            raise
        except RuntimeError as err:
            raise self._connection_lost(err) from err

    def post_receive(self, *shape: int, source: int, dtype: torch.dtype = torch.float32, tag: int = ROWS) -> "PendingReceive":
        """Post a receive; posted early, it spares the sender a round trip."""
        self.check()
        tensor = torch.empty(*shape, dtype=dtype)
        buffer = torch.empty(STAMP.size + tensor.nbytes, dtype=torch.uint8) if self._link.simulated else tensor
        try:
            return PendingReceive(self, self._gloo.recv([buffer], source, tag), tensor, buffer, self._link)
        except RuntimeError as err:
            raise self._connection_lost(err) from err

    def wait(self, work: Any) -> None:
        """Wait for a receive and count the time."""
        began = time.perf_counter()
        try:
            self._sends.flush()
            self._receives.wait(work, self.check)
            self.transfers.waited_s += time.perf_counter() - began
        except RankError:
            raise
        except RuntimeError as err:
            raise self._connection_lost(err) from err

    def check(self) -> None:
        """Raise if a rank is lost."""
        self.lost = self.lost or self._heartbeat.lost
        if self.lost is not None:
            raise RankError(self.lost)

    def abort(self, reason: str) -> None:
        """Make the group unusable for all ranks, by stopping this rank's heartbeat."""
        self.lost = self.lost or reason
        self._heartbeat.stop()

    def open_nccl(self, mesh: Mesh) -> None:
        """Connect the GPUs of a stage through NCCL; every rank calls it, with its GPU as the current device."""
        store = dist.PrefixStore(self._key(f"nccl/{mesh.stage(self.rank)}"), self._store)
        self.devices = device_group(store, mesh.rank_in_stage(self.rank), mesh.width, JOIN_S)
        self.capturable = True

    def _abort_nccl(self) -> None:
        """Abort NCCL, whose kernels would otherwise wait forever."""
        devices, self.devices = self.devices, None
        if devices is not None:
            # kernels end at once, but NCCL itself only after the CUDA graphs with its calls are gone
            thread = Thread(target=_abort_devices, args=(devices,), name="auraflux-abort", daemon=True)
            thread.start()
            thread.join(ABORT_S)

    def report_failure(self, reason: str) -> None:
        """Publish the reason why this rank ends."""
        self._heartbeat.publish_failure(reason)

    def _connection_lost(self, err: RuntimeError) -> RankError:
        """Return the error of a closed connection, with the reason that the other rank published."""
        self.lost = self.lost or self._heartbeat.published_failure() or "a rank is lost: its connection was closed."
        return RankError(self.lost)

    def close(self) -> None:
        """Finish pending sends and disconnect."""
        with suppress(RankError, RuntimeError):
            if self.lost is None:
                self._sends.finish()
        self.lost = self.lost or "the group was closed."
        self._heartbeat.stop()
        self._receives.stop()
        self._sends.stop()
        self._abort_nccl()
        # a thread that is within torch's store when Python exits would abort the process
        self._heartbeat.join(HEARTBEAT_END_S)


def _abort_devices(devices: Any) -> None:
    # raised after a timeout
    with suppress(RuntimeError):
        devices.abort()


def _stamped(tensor: Tensor, due: float) -> Tensor:
    stamp = torch.frombuffer(bytearray(STAMP.pack(due)), dtype=torch.uint8)
    return torch.cat([stamp, tensor.contiguous().view(torch.uint8).flatten()])


class PendingReceive:
    """A posted receive; on a simulated link, its buffer includes the arrival time."""

    def __init__(self, group: Group, work: Any, tensor: Tensor, buffer: Tensor, link: SimulatedLink):
        self._group, self._work, self._tensor, self._buffer, self._link = group, work, tensor, buffer, link

    def wait(self, length: int | None = None) -> Tensor:
        """Wait for the tensor and return it, or its first `length` elements where fewer were sent."""
        self._group.wait(self._work)
        found = self._tensor[:length]
        if not self._link.simulated:
            return found
        (due,) = STAMP.unpack(self._buffer[: STAMP.size].numpy().tobytes())
        self._link.arrive(found.nbytes, due)
        return self._buffer[STAMP.size :].view(self._tensor.dtype).view(self._tensor.shape)[:length]
