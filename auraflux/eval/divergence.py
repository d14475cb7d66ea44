"""The divergence of two runs of a model: the first token and layer that differ, and by how much."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.eval.metrics import compare
from auraflux.loading.language_model import LanguageModel


@dataclass(frozen=True)
class Trace:
    """A traced run: the residual stream after each layer, [T, H], and the logits after each token, [T, V]."""

    streams: list[Tensor]
    logits: Tensor


@dataclass(frozen=True)
class LayerDivergence:
    """The first token whose residual stream differs after a layer, None for none, and the relative RMS difference."""

    layer: int
    token: int | None
    error: float


@dataclass(frozen=True)
class Divergence:
    """The differences of two traces.

    token      first whose logits differ; None where all bits are the same
    layer      first whose residual stream differs at that token; None where only the logits do
    choice     first token after which the most likely token differs; None for none
    likeliest  the two tokens there, and their probabilities: (token, of A, of B)
    kl_mean    mean KL divergence of B from A, in nats
    kl_most    the largest, after token `kl_at`
    """

    token: int | None
    layer: int | None
    choice: int | None
    likeliest: tuple[tuple[int, float, float], ...]
    kl_mean: float
    kl_most: float
    kl_at: int
    layers: list[LayerDivergence]


class _Recorded:
    """A layer that records its outputs."""

    def __init__(self, layer: Any):
        self.layer, self.outputs = layer, list[Tensor]()

    def __call__(self, x: Tensor, delta: Tensor | None, batch: Any, store: Any) -> Any:
        out, waiting = self.layer(x, delta, batch, store)
        self.outputs.append((out if waiting is None else out + waiting).float().cpu().clone())
        return out, waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


@contextmanager
def _recorded(model: Any) -> Iterator[list[_Recorded]]:
    layers = model.layers
    model.layers = [_Recorded(layer) for layer in layers]
    try:
        yield model.layers
    finally:
        model.layers = layers


def trace(model: LanguageModel, ids: list[int], chunk: int | None = None) -> Trace:
    """Prefill tokens, `chunk` at a time, and record the output of every layer.

    The model must have been loaded without graphs: a replayed step runs no Python.
    """
    engine, logits = model.engine, []
    size = min(chunk or engine.chunk, engine.chunk)
    chunks = [ids[start : start + size] for start in range(0, len(ids), size)]
    with model.scheduler.exclusive(), _recorded(engine.model) as layers:
        sequence = engine.cache.open()
        batch = engine.cache.batch([sequence])
        try:
            for each in chunks:
                logits.append(engine.compute_logits(engine.step(batch, [each])).float().cpu().clone())
        finally:
            sequence.close()
    # a step on a GPU may have padding
    streams = [torch.cat([output[: len(each)] for output, each in zip(layer.outputs, chunks, strict=True)]) for layer in layers]
    return Trace(streams, torch.cat(logits))


def compare_traces(a: Trace, b: Trace) -> Divergence:
    """Compare two traces of the same tokens."""
    found = compare(a.logits, b.logits, torch.zeros(len(a.logits), dtype=torch.int64))
    token = _first((a.logits != b.logits).any(-1))
    layers = [
        LayerDivergence(number, _first((x != y).any(-1)), float((x - y).norm() / x.norm().clamp_min(1e-30)))
        for number, (x, y) in enumerate(zip(a.streams, b.streams, strict=True))
    ]
    at = [token is not None and bool((x[token] != y[token]).any()) for x, y in zip(a.streams, b.streams, strict=True)]
    choice = _first(torch.tensor(found.same) == 0)
    most = max(range(len(found.kl)), key=lambda number: found.kl[number])
    return Divergence(
        token=token,
        layer=at.index(True) if any(at) else None,
        choice=choice,
        likeliest=() if choice is None else _likeliest(a.logits[choice], b.logits[choice]),
        kl_mean=sum(found.kl) / len(found.kl),
        kl_most=found.kl[most],
        kl_at=most,
        layers=layers,
    )


def _first(differ: Tensor) -> int | None:
    return int(differ.int().argmax()) if bool(differ.any()) else None


def _likeliest(a: Tensor, b: Tensor) -> tuple[tuple[int, float, float], ...]:
    chances = a.softmax(-1), b.softmax(-1)
    tokens = [int(each.argmax()) for each in chances]
    return tuple((token, float(chances[0][token]), float(chances[1][token])) for token in tokens)
