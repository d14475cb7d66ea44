"""Where the time of one decode step goes: by op, and on a GPU how many kernels it takes."""

import json
import tempfile
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from auraflux.cache import Batch
from auraflux.ops._dispatch import Op
from auraflux.run.engine import Engine

MARK = "op "  # before the names of ops in a trace
OTHER = "other"  # what runs outside of ops: torch's own kernels


@dataclass
class Cost:
    """What an op took in a step: how often it was called, its kernels (None where there are none to count) and their time."""

    calls: int = 0
    kernels: int | None = None
    seconds: float = 0.0


def profile_step(engine: Engine, batch: Batch, ids: list[int]) -> dict[str, Cost]:
    """Run one step of decoding without replay and divide its time among ops, the dearest first."""

    def step() -> None:
        engine.score(engine.step(batch, [[token] for token in ids]))

    step()
    found = _on_gpu(step) if engine.device.type == "cuda" else _on_cpu(step)
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def kernels_per_layer(costs: dict[str, Cost], layers: int) -> float:
    """Kernels of a step divided by its layers; the few before and after them are counted in."""
    return sum(cost.kernels or 0 for cost in costs.values()) / layers


@contextmanager
def _around_ops(around: Callable[[str], Any]) -> Iterator[None]:
    """Enter `around(name)` for each call of an op that a model makes; ops within ops count as the outer one."""
    plain, depth = Op.__call__, 0

    def call(self: Op, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if depth:
            return plain(self, *args, **kwargs)
        depth += 1
        try:
            with around(self.name):
                return plain(self, *args, **kwargs)
        finally:
            depth -= 1

    with patch.object(Op, "__call__", call):
        yield


def _on_cpu(step: Callable[[], None]) -> dict[str, Cost]:
    costs: dict[str, Cost] = defaultdict(Cost)

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        costs[name].seconds += time.perf_counter() - began
        costs[name].calls += 1

    began = time.perf_counter()
    with _around_ops(timed):
        step()
    costs[OTHER].seconds = time.perf_counter() - began - sum(cost.seconds for cost in costs.values())
    return costs


def _on_gpu(step: Callable[[], None]) -> dict[str, Cost]:
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as found, _around_ops(lambda name: record_function(f"{MARK}{name}")):
        step()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        found.export_chrome_trace(file.name)
        return divide(json.loads(Path(file.name).read_text())["traceEvents"])


def divide(events: list[dict[str, Any]]) -> dict[str, Cost]:
    """Give each kernel of a trace to the op during whose call it was launched.

    events  of torch's profiler: ops are annotations that begin with MARK, a launch and its kernel have one correlation number
    """
    costs: dict[str, Cost] = defaultdict(lambda: Cost(kernels=0))
    calls = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(MARK)]
    calls.sort(key=lambda call: call["ts"])
    for call in calls:
        costs[call["name"].removeprefix(MARK)].calls += 1
    begins = [call["ts"] for call in calls]
    launches = {e["args"]["correlation"]: e["ts"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    for kernel in (e for e in events if e.get("cat") == "kernel"):
        when = launches.get(kernel["args"].get("correlation"), 0.0)
        number = bisect_right(begins, when) - 1
        inside = number >= 0 and when <= calls[number]["ts"] + calls[number]["dur"]
        cost = costs[calls[number]["name"].removeprefix(MARK) if inside else OTHER]
        cost.kernels = (cost.kernels or 0) + 1
        cost.seconds += kernel["dur"] * 1e-6
    return costs
