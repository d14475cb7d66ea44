"""The profile of one decode step: time by op, and on a GPU the number of kernels."""

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
from auraflux.engine.engine import Engine
from auraflux.ops._dispatch import Op

MARK = "op "  # prefix of the names of ops in a trace
OTHER = "other"  # outside of ops: torch's own kernels


@dataclass
class Cost:
    """The cost of an op in a step: calls, kernels (None where they are not counted) and seconds."""

    calls: int = 0
    kernels: int | None = None
    seconds: float = 0.0


def profile_step(engine: Engine, batch: Batch, ids: list[int]) -> dict[str, Cost]:
    """Run one decode step without replay and divide its time among ops, the most expensive first."""

    def step() -> None:
        engine.compute_logits(engine.step(batch, [[token] for token in ids]))

    step()
    found = _on_gpu(step) if engine.device.type == "cuda" else _on_cpu(step)
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def kernels_per_layer(costs: dict[str, Cost], layers: int) -> float:
    """Divide the kernels of a step by its layers; those before and after the layers count too."""
    return sum(cost.kernels or 0 for cost in costs.values()) / layers


@contextmanager
def _around_ops(around: Callable[[str], Any]) -> Iterator[None]:
    """Enter `around(name)` for each op that a model calls; ops within ops count as the outer one."""
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
    """Assign each kernel of a trace to the op whose call launched it.

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
