"""Capture of a step: as a CUDA graph on a GPU, as a list of kernel launches on a CPU."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from auraflux.garbage import no_garbage_collection

NO_MEMORY = "the GPU has no memory for the graph"


class Replay(Protocol):
    """A recorded step; `spoiled` is the reason why it cannot be replayed."""

    @property
    def rejected(self) -> str | None: ...
    def replay(self) -> None: ...


def record_launches(work: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
    """Run a step on the CPU and record its kernel launches."""
    from auraflux.ops.simd.replay.record import record

    with record() as recording:
        result = work()
    return recording, result


@dataclass(frozen=True)
class CudaGraph:
    """A step captured as a CUDA graph."""

    graph: torch.cuda.CUDAGraph
    rejected: str | None = None

    def replay(self) -> None:
        self.graph.replay()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Disable garbage collection and warnings of a capture; it fails when a collected engine frees its graphs."""
    with no_garbage_collection(), warnings.catch_warnings():
        # from a step that refuses capture before its first launch
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        # from calls before the capture that NCCL's watchdog has not seen complete
        warnings.filterwarnings("ignore", "Waiting for pending NCCL work")
        yield


class CudaCapture:
    """Captures steps as CUDA graphs, which share one memory pool: no result outlives the next step.

    NCCL calls are captured too, and must be captured by all ranks or by none: a graph is used only if `agree` returns no
    failure of any rank.
    """

    def __init__(self, agree: Callable[[str | None], str | None]) -> None:
        self._pool, self._agree = torch.cuda.graph_pool_handle(), agree

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        graph, rejected = torch.cuda.CUDAGraph(), None
        try:
            # thread_local: other threads may copy to the device, and NCCL's watchdog queries events
            with _undisturbed(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = work()
        except torch.OutOfMemoryError:
            self._agree(NO_MEMORY)
            raise
        except RuntimeError as err:
            rejected = str(err).partition("\n")[0]
        rejected = self._agree(rejected)
        if rejected is not None:
            return CudaGraph(graph, rejected), work()
        # capturing runs nothing
        graph.replay()
        return CudaGraph(graph), result
