"""Speed of a model on parallel ranks of this machine, with simulated networks."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from auraflux.distributed.comm.slow_link import HERE, find_link
from auraflux.distributed.leader import Leader
from auraflux.distributed.parallel import TENSOR, Parallel
from auraflux.loading.language_model import LanguageModel
from auraflux.loading.load import load_with
from auraflux.loading.options import LoadOptions

PAGE = 64  # tokens
FIRST, STRIDE = 5, 101  # first token of the first prompt, and the distance between prompts; tokens count up


@dataclass(frozen=True)
class RanksRun:
    """The speed of one parallel layout.

    way         as in --parallel
    size        ranks
    prefill     tokens per second of a prompt
    decode      tokens per second of one sequence
    token_s     median of its decode steps
    best_s      its fastest step, which other load on the machine affects least
    together    tokens per second of several sequences
    waited_s    of a step in which rank 0 was idle
    sent_nbytes of a step by rank 0
    wire_s      of a step that the simulated network takes
    read_rate   bytes of experts per second from the disks of all ranks; 0 where none are read
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
    path: str | Path, ways: list[Parallel], *, prompt: int, tokens: int, sequences: int, options: LoadOptions
) -> list[RanksRun]:
    """Time one process, and then each parallel layout with its network."""
    # every sequence has its own pages
    context = -(-(prompt + tokens + 8) // PAGE) * PAGE
    options = replace(options, context=context, max_sequences=sequences, cache_memory="half")
    found = [_timed(load_with(path, options), None, prompt, tokens, sequences)]
    for way in ways:
        model = load_with(path, replace(options, parallel=way))
        assert isinstance(model.engine.ranks, Leader)
        try:
            found.append(_timed(model, way, prompt, tokens, sequences))
        finally:
            model.engine.ranks.close()
    return found


def _timed(model: LanguageModel, way: Parallel | None, prompt: int, tokens: int, sequences: int) -> RanksRun:
    # warm up: compile kernels and capture steps of the same lengths
    _step_times(model, prompt, 4, 1)
    _step_times(model, prompt, 4, sequences)
    before, read, began = _counts(model), _read_nbytes(model), time.perf_counter()
    prefill_s, steps = _step_times(model, prompt, tokens, 1)
    nbytes, waited_s = (now - then for now, then in zip(_counts(model), before, strict=True))
    _, several = _step_times(model, prompt, tokens, sequences)
    read_rate = (_read_nbytes(model) - read) / (time.perf_counter() - began)
    each = tokens + 1
    row_nbytes = 4 * model.engine.model.config.hidden
    crossed = 0.0 if way is None else _crossings(model, way) * find_link(way.network).seconds(row_nbytes)
    named = ("one process", 1, HERE) if way is None else (str(way), way.mesh.size, way.network)
    return RanksRun(
        *named, prompt / prefill_s, 1 / median(steps), median(steps), min(steps), sequences / median(several),
        waited_s / each, round(nbytes / each), crossed, read_rate,
    )  # fmt: skip


def _crossings(model: LanguageModel, way: Parallel) -> int:
    """Count the network hops of a token."""
    mesh, layers = way.mesh, model.engine.model.config.layers
    return (0 if mesh.single_stage else mesh.stages) + layers * sum(2 if mode == TENSOR else 1 for mode in mesh.modes)


def _read_nbytes(model: LanguageModel) -> int:
    """Return the bytes of experts that all ranks have read so far."""
    ranks = model.engine.ranks
    here = 0 if model.experts is None else model.experts.cache_stats().total.nbytes
    return here + (ranks.read_nbytes() if isinstance(ranks, Leader) else 0)


def _tally(model: LanguageModel) -> Any:
    ranks = model.engine.ranks
    return ranks.group.transfers if isinstance(ranks, Leader) else None


def _counts(model: LanguageModel) -> tuple[int, float]:
    transfers = _tally(model)
    return (0, 0.0) if transfers is None else (transfers.nbytes, transfers.waited_s)


def _step_times(model: LanguageModel, prompt: int, tokens: int, count: int) -> tuple[float, list[float]]:
    """Return the seconds of prefill per prompt, and of each decode step of `count` sequences."""
    engine, vocab = model.engine, model.engine.model.config.vocab
    sequences = [engine.cache.open() for _ in range(count)]
    ids = [[(FIRST + number * STRIDE + at) % vocab for at in range(prompt)] for number in range(count)]
    began = time.perf_counter()
    for sequence, own in zip(sequences, ids, strict=True):
        for start in range(0, prompt - 1, engine.chunk):
            engine.prefill([sequence], [own[start : min(start + engine.chunk, prompt - 1)]])
    batch, steps = engine.decode_batch(sequences), []
    last = [own[-1] for own in ids]
    engine.decode(batch, last)
    last = [(token + 1) % vocab for token in last]
    prefill_s = (time.perf_counter() - began) / count
    for _ in range(tokens):
        began = time.perf_counter()
        engine.decode(batch, last)
        steps.append(time.perf_counter() - began)
        # all layouts decode the same tokens, which do not repeat as a model's own choice may
        last = [(token + 1) % vocab for token in last]
    for sequence in sequences:
        sequence.close()
    return prefill_s, steps
