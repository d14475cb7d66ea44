"""Where two ways of running a model part: at which token and layer first, and by how much."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.eval.metrics import compare
from auraflux.run.language import LanguageModel


@dataclass(frozen=True)
class Trace:
    """What a model made of a text: the stream after each layer, [T, H], and the scores after each token, [T, V]."""

    streams: list[Tensor]
    scores: Tensor


@dataclass(frozen=True)
class LayerParting:
    """The first token whose stream differs after a layer, None for none, and the relative RMS of the difference over all."""

    layer: int
    token: int | None
    error: float


@dataclass(frozen=True)
class Parting:
    """How two traces differ.

    token        first whose scores differ; None where all bits are the same
    layer        first whose stream differs at that token; None where only the scores do
    choice       first token after which another is likeliest; None for none
    likeliest    the two tokens there, and their probabilities: (token, of A, of B)
    kl_mean      divergence of B's probabilities from A's, in nats
    kl_most      the largest, after token `kl_at`
    """

    token: int | None
    layer: int | None
    choice: int | None
    likeliest: tuple[tuple[int, float, float], ...]
    kl_mean: float
    kl_most: float
    kl_at: int
    layers: list[LayerParting]


class _Watched:
    """A layer that keeps what it gives."""

    def __init__(self, layer: Any):
        self.layer, self.kept = layer, list[Tensor]()

    def __call__(self, x: Tensor, delta: Tensor | None, batch: Any, store: Any) -> Any:
        out, waiting = self.layer(x, delta, batch, store)
        self.kept.append((out if waiting is None else out + waiting).float().cpu().clone())
        return out, waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


@contextmanager
def _watched(model: Any) -> Iterator[list[_Watched]]:
    layers = model.layers
    model.layers = [_Watched(layer) for layer in layers]
    try:
        yield model.layers
    finally:
        model.layers = layers


def trace(model: LanguageModel, ids: list[int], piece: int | None = None) -> Trace:
    """Read a text through the cache, `piece` tokens at a time, and keep what every layer makes of it.

    The model must have been loaded without graphs: a step that is replayed runs no Python.
    """
    engine, scores = model.engine, []
    size = min(piece or engine.chunk, engine.chunk)
    pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
    with model.scheduler.claimed(), _watched(engine.model) as layers:
        sequence = engine.cache.open()
        batch = engine.cache.batch([sequence])
        try:
            for each in pieces:
                scores.append(engine.score(engine.step(batch, [each])).float().cpu().clone())
        finally:
            sequence.close()
    # a step on a GPU may be filled up with other tokens
    streams = [torch.cat([kept[: len(each)] for kept, each in zip(layer.kept, pieces, strict=True)]) for layer in layers]
    return Trace(streams, torch.cat(scores))


def part(a: Trace, b: Trace) -> Parting:
    """Compare two traces of the same text."""
    found = compare(a.scores, b.scores, torch.zeros(len(a.scores), dtype=torch.int64))
    token = _first((a.scores != b.scores).any(-1))
    layers = [
        LayerParting(number, _first((x != y).any(-1)), float((x - y).norm() / x.norm().clamp_min(1e-30)))
        for number, (x, y) in enumerate(zip(a.streams, b.streams, strict=True))
    ]
    at = [token is not None and bool((x[token] != y[token]).any()) for x, y in zip(a.streams, b.streams, strict=True)]
    choice = _first(torch.tensor(found.same) == 0)
    most = max(range(len(found.kl)), key=lambda number: found.kl[number])
    return Parting(
        token=token,
        layer=at.index(True) if any(at) else None,
        choice=choice,
        likeliest=() if choice is None else _likeliest(a.scores[choice], b.scores[choice]),
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
