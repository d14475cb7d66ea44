"""Timing of calls on a GPU: captured as one CUDA graph, which is replayed between two events.

A graph has no Python and no gaps between launches, like decode. The rest of the benchmark knows only `Record`, so that its
arithmetic can be tested without a GPU.
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
MIN_SAMPLES = 3  # of a round
MAX_SAMPLES = 200
GRAPH_S = 1e-3  # a replay of this length hides the cost of its launch and its events
MAX_CALLS = 1024  # in a graph


class Recording(Protocol):
    """Calls that can be replayed.

    calls     number of calls
    launches  kernels and copies of all calls; None where they cannot be counted
    """

    calls: int
    launches: int | None

    def replay(self, times: int) -> list[float]:
        """Return the seconds of each replay of all calls."""


Record = Callable[[Calls], Recording]


class Graph:
    """Calls as one CUDA graph."""

    def __init__(self, calls: Calls):
        self.calls = len(calls)
        stream = _stream()
        stream.wait_stream(torch.cuda.current_stream())
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(stream):
            # the first call of each kind compiles, tunes and allocates
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
    """Return the number of nodes of a graph, from the driver."""
    count = ctypes.c_size_t()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    except (OSError, AttributeError):
        return None
    return None if failed else count.value


def record_long(calls: Calls, record: Record) -> Recording:
    """Record calls, repeated if one round of them is too short to be timed."""
    first = record(calls)
    took = min(first.replay(3))
    repeats = times_over(len(calls), took)
    return first if repeats == 1 else record(list(calls) * repeats)


def times_over(calls: int, took_s: float) -> int:
    """Return how often to repeat calls that took `took_s` in all, to fill a graph."""
    return max(1, min(math.ceil(GRAPH_S / max(took_s, 1e-9)), MAX_CALLS // calls))


@dataclass
class Contender:
    """One implementation of the work, recorded, and the seconds of each call so far."""

    recording: Recording
    samples_s: list[float] = field(default_factory=list)

    def burst(self, duration_s: float) -> None:
        """Take samples for about the given time; the first replay raises the clocks and does not count."""
        (took,) = self.recording.replay(1)
        times = max(MIN_SAMPLES, min(MAX_SAMPLES, int(duration_s / max(took, 1e-9))))
        self.samples_s += [seconds / self.recording.calls for seconds in self.recording.replay(times)]

    @property
    def launches(self) -> float | None:
        """Return the kernel launches of one call; None where they were not counted."""
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
