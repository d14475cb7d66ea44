"""What it costs and brings to divide a model among ranks, on networks that are slower than this machine's memory."""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from auraflux.run.language import LanguageModel
from auraflux.run.load import load
from auraflux.run.ranks.lead import Lead
from auraflux.run.ranks.parallel import TENSOR, Parallel
from auraflux.run.ranks.wire import HERE, find_wire

PAGE = 64  # tokens
FIRST, APART = 5, 101  # token of prompts, and how far those of two texts are from each other; the others follow it


@dataclass(frozen=True)
class RanksRun:
    """One way to run a model.

    way         as --parallel has it; size  of the group
    prefill     tokens a second of a prompt
    decode      tokens a second of one text
    token_s     median of one of its steps; best_s  the fastest, which others' work on the machine lengthens least
    together    tokens a second of several texts
    waited_s    of a step, in which rank 0 had nothing to do
    sent_nbytes of a step, by rank 0
    wire_s      of a step, that the pretended network takes by itself
    read_rate   bytes of experts a second, from the disks of all ranks; 0 where none are read
    """

    way: str
    size: int
    wire: str
    prefill: float
    decode: float
    token_s: float
    best_s: float
    together: float
    waited_s: float = 0.0
    sent_nbytes: int = 0
    wire_s: float = 0.0
    read_rate: float = 0.0


def bench_ranks(
    path: str | Path, ways: list[Parallel], *, prompt: int, tokens: int, texts: int, **options: Any
) -> list[RanksRun]:
    """Time one process, and then each way to divide the model, with its wire."""
    # every text has pages of its own, however short it is
    context = -(-(prompt + tokens + 8) // PAGE) * PAGE
    options = {"context": context, "sequences": texts, "cache_memory": "half", **options}
    found = [_timed(load(path, **options), None, prompt, tokens, texts)]
    for way in ways:
        model = load(path, parallel=way, **options)
        assert isinstance(model.engine.ranks, Lead)
        try:
            found.append(_timed(model, way, prompt, tokens, texts))
        finally:
            model.engine.ranks.close()
    return found


def _timed(model: LanguageModel, way: Parallel | None, prompt: int, tokens: int, texts: int) -> RanksRun:
    # kernels are compiled, and steps recorded, by one of the same lengths
    _step_times(model, prompt, 4, 1)
    _step_times(model, prompt, 4, texts)
    before, read, began = _counts(model), _read_nbytes(model), time.perf_counter()
    prefill_s, steps = _step_times(model, prompt, tokens, 1)
    nbytes, waited_s = (now - then for now, then in zip(_counts(model), before, strict=True))
    _, several = _step_times(model, prompt, tokens, texts)
    read_rate = (_read_nbytes(model) - read) / (time.perf_counter() - began)
    each = tokens + 1
    crossed = 0.0 if way is None else _crossings(model, way) * find_wire(way.wire).seconds(4 * model.engine.model.config.hidden)
    named = ("one process", 1, HERE) if way is None else (str(way), way.mesh.size, way.wire)
    return RanksRun(
        *named, prompt / prefill_s, 1 / median(steps), median(steps), min(steps), texts / median(several),
        waited_s / each, round(nbytes / each), crossed, read_rate,
    )  # fmt: skip


def _crossings(model: LanguageModel, way: Parallel) -> int:
    """How often a token has to wait for the network."""
    mesh, layers = way.mesh, model.engine.model.config.layers
    return (0 if mesh.whole else mesh.stages) + layers * sum(2 if mode == TENSOR else 1 for mode in mesh.modes)


def _read_nbytes(model: LanguageModel) -> int:
    """Bytes of experts that all ranks have read so far."""
    ranks = model.engine.ranks
    here = 0 if model.experts is None else model.experts.traffic().total.nbytes
    return here + (ranks.read_nbytes() if isinstance(ranks, Lead) else 0)


def _tally(model: LanguageModel) -> Any:
    ranks = model.engine.ranks
    return ranks.group.tally if isinstance(ranks, Lead) else None


def _counts(model: LanguageModel) -> tuple[int, float]:
    tally = _tally(model)
    return (0, 0.0) if tally is None else (tally.nbytes, tally.waited_s)


def _step_times(model: LanguageModel, prompt: int, tokens: int, texts: int) -> tuple[float, list[float]]:
    """Seconds of reading a prompt, and of each step of writing so many texts."""
    engine, vocab = model.engine, model.engine.model.config.vocab
    sequences = [engine.cache.open() for _ in range(texts)]
    ids = [[(FIRST + number * APART + at) % vocab for at in range(prompt)] for number in range(texts)]
    began = time.perf_counter()
    for sequence, text in zip(sequences, ids, strict=True):
        for start in range(0, prompt - 1, engine.chunk):
            engine.read([sequence], [text[start : min(start + engine.chunk, prompt - 1)]])
    batch, steps = engine.writing(sequences), []
    last = [text[-1] for text in ids]
    engine.decode(batch, last)
    last = [(token + 1) % vocab for token in last]
    prefill_s = (time.perf_counter() - began) / texts
    for _ in range(tokens):
        began = time.perf_counter()
        engine.decode(batch, last)
        steps.append(time.perf_counter() - began)
        # all ways write the same, which does not repeat itself as a model's own choice may
        last = [(token + 1) % vocab for token in last]
    for sequence in sequences:
        sequence.close()
    return prefill_s, steps
