"""How fast a whole model reads and writes, at several lengths of what it has before it."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from auraflux.bench.profile import Cost, profile_step
from auraflux.errors import ContextError
from auraflux.run.job import Job
from auraflux.run.request import Event, Request
from auraflux.run.sampling import Sampling
from auraflux.run.scheduler import Scheduler

WARM_UP = 8  # tokens that pay for compiling and for the first touch of the weights


@dataclass(frozen=True)
class Speed:
    """At one length: tokens per second, over all texts, of reading prompts of it and of writing after them."""

    who: str
    context: int
    batch: int
    prefill_rate: float
    decode_rate: float
    cache_nbytes: int | None = None


class Contender(Protocol):
    """Something that reads tokens and then writes more; `batch` texts at once."""

    name: str
    batch: int

    def read(self, ids: list[int]) -> None:
        """Forget everything, then take a prompt."""

    def write(self, count: int) -> None:
        """Write so many tokens, each the likeliest."""

    def cache_nbytes(self) -> int | None: ...


class Ours:
    """Our scheduler, with `batch` texts at once."""

    def __init__(self, scheduler: Scheduler, batch: int = 1):
        self.scheduler, self.engine, self.batch = scheduler, scheduler.engine, batch
        self.name = f"auraflux {self.engine.cache.settings.kv}" + (" exact" if self.engine.runner.exact else "")
        self.name += " invariant" if self.engine.runner.invariant else ""
        self._jobs: list[Job] = []
        self._events: list[Event] = []

    def read(self, ids: list[int]) -> None:
        self._end()
        self.scheduler.prefixes.clear()
        settings = Sampling(endless=True)
        vocab = self.engine.model.config.vocab
        # nothing in common: tokens of texts that are alike go to the same experts
        texts = [tuple(ids), *(_text(len(ids), vocab, seed) for seed in range(1, self.batch))]
        self._jobs = [self.scheduler.submit(Request(text, settings), self._events.append) for text in texts]
        while any(job.sequence is None or job.unread for job in self._jobs):
            self.scheduler.turn(write=False)
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()

    def write(self, count: int) -> None:
        self._events.clear()
        while len(self._events) < count * self.batch:
            self.scheduler.turn()

    def costs(self) -> dict[str, Cost]:
        """What the next step takes, by op."""
        texts = [job.ids for job in self._jobs]
        self._end()
        starts = [self.scheduler.prefixes.open(ids) for ids in texts]
        for start, ids in zip(starts, texts, strict=True):
            if rest := ids[start.held : -1]:
                self.engine.read([start.sequence], [rest])
        batch = self.engine.cache.batch([start.sequence for start in starts])
        found = profile_step(self.engine, batch, [ids[-1] for ids in texts])
        for start in starts:
            start.sequence.close()
        return found

    def cache_nbytes(self) -> int:
        return sum(job.held.nbytes for job in self._jobs)

    def _end(self) -> None:
        for job in self._jobs:
            self.scheduler.cancel(job)
        self.scheduler.turn()
        self._jobs = []


class LlamaCpp:
    """llama-cpp-python on the same file, with as many threads."""

    name, batch = "llama.cpp", 1

    def __init__(self, path: Path, context: int, threads: int):
        from llama_cpp import Llama

        self.model = Llama(
            str(path), n_ctx=context, n_threads=threads, n_threads_batch=threads, n_batch=512, n_ubatch=512, verbose=False
        )
        self._next = 0

    def read(self, ids: list[int]) -> None:
        self.model.reset()
        self.model.eval(ids)
        self._next = self.model.sample(temp=0.0)

    def write(self, count: int) -> None:
        for _ in range(count):
            self.model.eval([self._next])
            self._next = self.model.sample(temp=0.0)

    def cache_nbytes(self) -> None:
        return None


def measure(
    contenders: list[Contender], lengths: list[int], vocab: int, tokens: int, repeat: int, tell: Callable[[str], None]
) -> Iterator[Speed]:
    """Time all contenders in turn at each length, `repeat` times over, and give the best of each."""
    for each in contenders:
        tell(f"{each.name}: warming up")
        each.read(list(_text(WARM_UP, vocab)))
        each.write(WARM_UP)
    for length in lengths:
        ids = list(_text(length, vocab))
        best: dict[str, tuple[float, float]] = {}
        for round_ in range(repeat):
            for each in contenders:
                tell(f"{each.name}: {length} tokens, round {round_ + 1}")
                read, write = _seconds(each.read, ids), _seconds(each.write, tokens)
                before = best.get(each.name, (read, write))
                best[each.name] = min(read, before[0]), min(write, before[1])
        for each in contenders:
            read, write = best[each.name]
            rates = each.batch * length / read, each.batch * tokens / write
            yield Speed(each.name, length, each.batch, *rates, each.cache_nbytes())


def check_lengths(lengths: list[int], tokens: int, context: int) -> None:
    """Refuse lengths the context has no room for."""
    most = max(lengths) + tokens
    if most > context:
        raise ContextError(f"a text of {most} tokens does not fit the context of {context}. Give --context {most} or more.")


@cache
def _text(length: int, vocab: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(f"{length} {seed}").choices(range(vocab), k=length))


def _seconds(work: Callable[[Any], None], argument: Any) -> float:
    began = time.perf_counter()
    work(argument)
    return time.perf_counter() - began
