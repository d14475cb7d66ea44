"""The Python overhead of ops on a CPU where a step is not replayed: `make overhead`.

A narrow model of random weights prefills a prompt, and its op calls are collected. Each call is then timed, and so are its
kernel launches alone, from a recording: the difference is Python. It does not depend on the model's width.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from auraflux.bench.random_weights import random_model
from auraflux.bench.shapes import shape_of
from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from auraflux.ops._dispatch import Op
from auraflux.ops.simd.replay.record import record

NARROW = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 4}
NARROW |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2}
NARROW |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
NARROW |= {"shared_expert_intermediate_size": 64, "vocab_size": 512, "tie_word_embeddings": True}
MODELS = {"llama": "llama-8b", "qwen3_moe": "qwen3-30b-a3b", "qwen3_5_moe": "qwen3.6-35b-a3b"}
ROUNDS, SECONDS = 9, 0.02


class Call(NamedTuple):
    """A call of an op that a step makes."""

    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Cost(NamedTuple):
    """The cost of one call in microseconds: Python's and the kernels'; None where they cannot be separated."""

    python: float
    kernels: float | None


def calls_of(model: str, tokens: int) -> list[Call]:
    """Return the op calls of a narrow model's step."""
    shape = shape_of(MODELS[model])
    config = {**shape, **{name: value for name, value in NARROW.items() if name in shape or name == "tie_word_embeddings"}}
    made, shapes = random_model(config, 4, 64, torch.float32, torch.device("cpu"))
    engine = Engine(made, shapes, CacheSettings("k4v4"), context=256, graphs=False)
    batch = engine.cache.batch([engine.cache.open()])
    engine.compute_logits(engine.step(batch, [[1] * tokens]))
    calls: list[Call] = []
    plain, inside = Op.__call__, False

    def note(self: Op, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return plain(self, *args, **kwargs)
        calls.append(Call(self, args, kwargs))
        inside = True
        try:
            return plain(self, *args, **kwargs)
        finally:
            inside = False

    with patch.object(Op, "__call__", note):
        engine.compute_logits(engine.step(batch, [[1] * tokens]))
    return calls


def cost_of(call: Call) -> Cost:
    """Time a call, and its launches alone."""

    def whole() -> Any:
        return call.op(*call.args, **call.kwargs)

    for _ in range(3):
        whole()
    with record() as recording:
        whole()
    took = _microseconds(whole)
    if recording.rejected is not None:
        return Cost(took, None)
    kernels = _microseconds(recording.replay)
    return Cost(took - kernels, kernels)


def _microseconds(work: Callable[[], Any]) -> float:
    """Return the fastest of several rounds: other load on the machine only makes them slower."""
    best, repeats = float("inf"), 1
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        each = (time.perf_counter() - began) / repeats
        best, repeats = min(best, each), max(1, int(SECONDS / ROUNDS / each))
    return best * 1e6


def main() -> None:
    """Print the Python overhead of every op, the most expensive of a step first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--tokens", type=int, default=2, help="of the step; 2 by default")
    options = parser.parse_args()
    for model in options.models:
        calls = calls_of(model, options.tokens)
        count = Counter(call.op.name for call in calls)
        first = {call.op.name: call for call in reversed(calls)}
        costs = {name: cost_of(call) for name, call in first.items()}
        print(f"\n{model}, {options.tokens} tokens, {NARROW['num_hidden_layers']} layers: us of a call")
        print(f"{'op':28} {'calls':>5} {'Python':>8} {'kernels':>8}")
        for name in sorted(costs, key=lambda name: -costs[name].python * count[name]):
            python, kernels = costs[name]
            print(f"{name:28} {count[name]:5} {python:8.1f} {'(in it)' if kernels is None else f'{kernels:.1f}':>8}")


if __name__ == "__main__":
    main()
