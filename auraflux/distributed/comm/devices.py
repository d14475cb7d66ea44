"""GPUs of ranks, and the NCCL process group of those on one machine.

NCCL refuses two ranks on one GPU, and across machines it chooses the network by itself. So it connects only ranks of one stage,
on GPUs of one machine; all other transfers go through gloo and host memory.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from auraflux.distributed.parallel import CONTEXT, Parallel
from auraflux.engine.device import find_device, free_device_nbytes
from auraflux.errors import RankError, SettingsError
from auraflux.machine import free_nbytes

LOOPBACK = "lo"  # network interface for NCCL's rendezvous on one machine


def under_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "MASTER_PORT" in os.environ


@dataclass(frozen=True)
class Devices:
    """Devices of all ranks, decided by rank 0.

    named   "cpu"; "cuda" where each rank has the GPU of its local rank; "cuda:0" where all share one
    shared  number of ranks per GPU
    nccl    ranks of a stage communicate through NCCL
    """

    named: str
    shared: int
    nccl: bool

    @classmethod
    def of(cls, parallel: Parallel, device: torch.device) -> "Devices":
        """Resolve the requested devices; refuse layouts that they do not support."""
        mesh = parallel.mesh
        if device.type == "cpu":
            return cls("cpu", 1, False)
        if CONTEXT in mesh.modes:
            raise SettingsError(
                f"context parallelism runs on CPUs only, and {parallel} is to run on {device}. Give --device cpu."
            )
        if parallel.hosts:
            # one rank per machine
            return cls(f"cuda:{device.index or 0}", 1, False)
        local_size = int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun() else mesh.size
        # torch's type stubs omit None
        index: int | None = device.index
        if index is not None:
            return cls(str(device), local_size, False)
        if (count := torch.cuda.device_count()) < local_size:
            raise SettingsError(
                f"{parallel} needs {local_size} GPUs on this machine, which has {count}. Give --device cpu, fewer ranks, or "
                "--device cuda:0 to share one."
            )
        return cls("cuda", 1, bool(mesh.modes) and local_size % mesh.width == 0)

    def device_of(self, rank: int) -> torch.device:
        """Return the device of a rank of this machine."""
        number = os.environ["LOCAL_RANK"] if under_torchrun() else rank
        return find_device(f"cuda:{number}" if self.named == "cuda" else self.named)

    def free_nbytes(self, device: torch.device) -> int:
        """Return the free memory per rank, in bytes."""
        return free_nbytes() if device.type == "cpu" else free_device_nbytes(device) // self.shared


def device_group(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """Connect the current GPUs of the ranks of one machine through NCCL; `store` is their rendezvous."""
    kind: Any = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None:
        raise RankError("this version of torch lacks NCCL, which several GPUs need.")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
    options = kind.Options()
    options._timeout = timedelta(seconds=timeout_s)
    try:
        made = kind(store, rank, size, options)
        # the first call opens connections, which is impossible during graph capture
        nccl_all_gather(made, torch.zeros(1, device="cuda"), size)
        torch.cuda.synchronize()
    except RuntimeError as err:
        raise RankError(f"NCCL cannot connect the GPUs of {size} ranks: {str(err).partition(chr(10))[0]}") from err
    return made


def nccl_all_gather(backend: Any, mine: Tensor, size: int) -> list[Tensor]:
    """Return the tensors of all ranks, by one all-gather of a torch process group (NCCL or gloo)."""
    found = mine.new_empty(size * mine.shape[0], *mine.shape[1:])
    backend._allgather_base(found, mine.contiguous()).wait()
    return list(found.view(size, *mine.shape).unbind())
