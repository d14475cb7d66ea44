"""GPUs of ranks: which one each has, and what those of one machine give each other through NCCL.

NCCL refuses two ranks on one GPU, and where ranks are on several machines it would choose a network by itself. So it serves
ranks that divide the same layers, on GPUs of one machine; all else goes through gloo and main memory.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from auraflux.errors import RankError, SettingsError
from auraflux.machine import free_nbytes
from auraflux.run.device import find_device, free_device_nbytes
from auraflux.run.ranks.parallel import CONTEXT, Parallel

HERE = "lo"  # the network through which GPUs of one machine find each other


def launched() -> bool:
    """Whether torchrun started this process."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "MASTER_PORT" in os.environ


@dataclass(frozen=True)
class Devices:
    """Where ranks run, as rank 0 tells them.

    named   "cpu"; "cuda" where each has the GPU with its number on its machine; "cuda:0" where all take the one of that name
    shared  how many ranks have the same GPU
    nccl    whether those that divide the same layers give each other what they have through NCCL
    """

    named: str
    shared: int
    nccl: bool

    @classmethod
    def of(cls, parallel: Parallel, device: torch.device) -> "Devices":
        """What was asked for; refused where it cannot be had."""
        mesh = parallel.mesh
        if device.type == "cpu":
            return cls("cpu", 1, False)
        if CONTEXT in mesh.modes:
            raise SettingsError(
                f"pages are dealt out to ranks on CPUs only, and {parallel} is to run on {device}. Give --device cpu."
            )
        if parallel.hosts:
            # each has a machine of its own
            return cls(f"cuda:{device.index or 0}", 1, False)
        here = int(os.environ["LOCAL_WORLD_SIZE"]) if launched() else mesh.size
        if device.index is not None:
            return cls(str(device), here, False)
        if (count := torch.cuda.device_count()) < here:
            raise SettingsError(
                f"{parallel} wants {here} GPUs of this machine, and there are {count}. Give --device cpu, fewer ranks, or "
                "--device cuda:0 to have all share one."
            )
        return cls("cuda", 1, bool(mesh.modes) and here % mesh.width == 0)

    def own(self, rank: int) -> torch.device:
        """A rank's device, if it is one of this machine."""
        number = os.environ["LOCAL_RANK"] if launched() else rank
        return find_device(f"cuda:{number}" if self.named == "cuda" else self.named)

    def free_nbytes(self, device: torch.device) -> int:
        """Memory that a rank may take there."""
        return free_nbytes() if device.type == "cpu" else free_device_nbytes(device) // self.shared


def device_group(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """GPUs of one machine that find each other through a store; every one is the current one of its rank."""
    kind: Any = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None:
        raise RankError("this build of torch has no NCCL, without which GPUs cannot share a model.")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", HERE)
    options = kind.Options()
    options._timeout = timedelta(seconds=timeout_s)
    try:
        made = kind(store, rank, size, options)
        # connections are made by the first call, which cannot be done while a step is recorded
        gathered(made, torch.zeros(1, device="cuda"), size)
        torch.cuda.synchronize()
    except RuntimeError as err:
        raise RankError(f"the GPUs of {size} ranks cannot reach each other: {str(err).partition(chr(10))[0]}") from err
    return made


def gathered(backend: Any, mine: Tensor, size: int) -> list[Tensor]:
    """What all ranks give, by one call of a process group of torch, be it gloo or NCCL."""
    found = mine.new_empty(size * mine.shape[0], *mine.shape[1:])
    backend._allgather_base(found, mine.contiguous()).wait()
    return list(found.view(size, *mine.shape).unbind())
