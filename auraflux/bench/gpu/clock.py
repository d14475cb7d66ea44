"""How calls are timed on a GPU: recorded as one CUDA graph, which is replayed between two events.

A graph leaves out Python and the gaps between launches, as decoding does. `Record` is all the rest of the benchmark knows of
it, so that its arithmetic can be tested without a GPU.
"""

import ctypes
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch

from auraflux.bench.timing import Timing

Calls = Sequence[Callable[[], object]]

ROUNDS = 5
FEWEST_SAMPLES = 3  # of a round
MOST_SAMPLES = 200
GRAPH_S = 1e-3  # a replay of this length hides what its launch and its events cost
MOST_CALLS = 1024  # in a graph


class Recording(Protocol):
    """Calls that can be made again and again.

    calls     how many there are
    launches  kernels and copies all of them make, or None where that cannot be counted
    """

    calls: int
    launches: int | None

    def replay(self, times: int) -> list[float]:
        """Seconds of each replay of all calls."""


Record = Callable[[Calls], Recording]


class Graph:
    """Calls as one CUDA graph."""

    def __init__(self, calls: Calls):
        self.calls = len(calls)
        stream = _stream()
        stream.wait_stream(torch.cuda.current_stream())
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(stream):
            # compiles, tunes and allocates whatever the first call of a kind or on some tensors does
            for call in {id(call): call for call in calls}.values():
                call()
            torch.cuda.synchronize()
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                for call in calls:
                    call()
            except Exception:
                with suppress(RuntimeError):
                    self._graph.capture_end()
                torch.cuda.synchronize()
                raise
            self._graph.capture_end()
        self.launches = _nodes(self._graph)
        self._graph.instantiate()

    def replay(self, times: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * times)]
        for begin, end in zip(events[::2], events[1::2], strict=True):
            begin.record()
            self._graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e-3 for begin, end in zip(events[::2], events[1::2], strict=True)]


@cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def _nodes(graph: Any) -> int | None:
    """Ask the driver how many launches a graph holds."""
    count = ctypes.c_size_t()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    except (OSError, AttributeError):
        return None
    return None if failed else count.value


def record_long(calls: Calls, record: Record) -> Recording:
    """Record calls, over and over where one round of them is too short to be timed."""
    first = record(calls)
    took = min(first.replay(3))
    repeats = times_over(len(calls), took)
    return first if repeats == 1 else record(list(calls) * repeats)


def times_over(calls: int, took_s: float) -> int:
    """How often to repeat calls that took so long in all, to fill a graph."""
    return max(1, min(math.ceil(GRAPH_S / max(took_s, 1e-9)), MOST_CALLS // calls))


@dataclass
class Contender:
    """One way of doing the work, recorded, and the seconds of each call so far."""

    recording: Recording
    samples_s: list[float] = field(default_factory=list)

    def burst(self, duration_s: float) -> None:
        """Take samples for about the given time; the first replay, which brings the clocks up, does not count."""
        (took,) = self.recording.replay(1)
        times = max(FEWEST_SAMPLES, min(MOST_SAMPLES, int(duration_s / max(took, 1e-9))))
        self.samples_s += [seconds / self.recording.calls for seconds in self.recording.replay(times)]

    @property
    def launches(self) -> float | None:
        """Kernel launches of one call; None where they were not counted."""
        return None if self.recording.launches is None else self.recording.launches / self.recording.calls

    def summary(self) -> Timing:
        ordered = sorted(self.samples_s)
        low, high = ordered[len(ordered) // 10], ordered[len(ordered) - 1 - len(ordered) // 10]
        return Timing(statistics.median(ordered), low, high, len(ordered))


def race(contenders: Sequence[Contender], budget_s: float) -> list[Timing]:
    """Time contenders in alternating bursts, each for about `budget_s` in all."""
    for _ in range(ROUNDS):
        for contender in contenders:
            contender.burst(budget_s / ROUNDS)
    return [contender.summary() for contender in contenders]
