"""Prefill and decode throughput of a whole model, at several context lengths."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from auraflux.bench.profile import Cost, profile_step
from auraflux.bench.routing import TracedRouting
from auraflux.engine.compile_ahead import compile_ahead
from auraflux.engine.request import Output, Request
from auraflux.engine.sampling import Sampling
from auraflux.errors import ContextError
from auraflux.scheduler.scheduler import Scheduler
from auraflux.scheduler.sequence import Sequence
from auraflux.weights.experts.pool.gpu_pool import GpuExpertPool
from auraflux.weights.experts.stats import ExpertCacheStats

COPIED_NBYTES = 256 << 20  # by which the bandwidth of copies to a GPU is measured
QUIET = 1  # verbosity of llama.cpp that logs errors
WARM_UP = 8  # tokens that touch the weights for the first time
COMPILED = 2  # tokens of a run that only shows which kernels are launched


@dataclass(frozen=True)
class ExpertTraffic:
    """Expert cache while tokens are decoded, in the best round.

    hit_rate              of all experts that tokens used
    misses_per_token      experts of a token that were not in GPU memory, over all layers
    nbytes_per_token      bytes copied to the GPU for a token
    on_cpu_per_token      missing experts that CPU threads computed
    prefetched_per_token  missing experts that were copied before their layer ran
    """

    hit_rate: float
    misses_per_token: float
    nbytes_per_token: float
    on_cpu_per_token: float = 0.0
    prefetched_per_token: float = 0.0


@dataclass(frozen=True)
class Speed:
    """Prefill and decode throughput at one prompt length, in tokens per second over all sequences."""

    who: str
    context: int
    batch: int
    prefill_rate: float
    decode_rate: float
    cache_nbytes: int | None = None
    experts: ExpertTraffic | None = None


class Round(NamedTuple):
    """Seconds of prefill and of decode, and what the expert cache did while tokens were decoded; None without one."""

    prefill_s: float
    decode_s: float
    traffic: ExpertTraffic | None = None


class Contender(Protocol):
    """An engine that prefills prompts and decodes `batch` sequences at once."""

    name: str
    batch: int

    def compile(self, lengths: list[int]) -> None:
        """Compile what prompts of these lengths need, as far as that is faster than to run them."""

    def run(self, ids: list[int], count: int) -> Round:
        """Prefill a prompt, and decode `count` tokens of each sequence."""

    def cache_nbytes(self) -> int | None: ...


class Ours:
    """Our scheduler, with `batch` sequences at once.

    experts  whose cache is measured. Tokens are then sampled: greedy tokens of random weights repeat, and so do their experts
    trace    whose tokens are prefilled and decoded, greedily
    """

    def __init__(
        self,
        scheduler: Scheduler,
        batch: int = 1,
        experts: GpuExpertPool | None = None,
        trace: TracedRouting | None = None,
    ):
        self.experts, self.trace, self._seed = experts, trace, 0
        self.scheduler, self.engine, self.batch = scheduler, scheduler.engine, batch
        self.name = f"auraflux {self.engine.cache.settings.kv}" + (" exact" if self.engine.runner.exact else "")
        self.name += " invariant" if self.engine.runner.invariant else ""
        self.name += " FP8 prefill" if self.engine.runner.fp8_prefill else ""
        self._jobs: list[Sequence] = []
        self._events: list[Output] = []

    def compile(self, lengths: list[int]) -> None:
        """Compile a GPU's kernels on all cores."""

        def work() -> None:
            for length in lengths:
                self.run(list(_prompt(length, self.engine.model.config.vocab)), COMPILED)

        with self.engine.graphs.disabled():
            compile_ahead(work, self.engine.device)

    def run(self, ids: list[int], count: int) -> Round:
        began = time.perf_counter()
        self.prefill(ids)
        prefilled, before = time.perf_counter(), self.expert_stats()
        self.decode(count)
        ended, after = time.perf_counter(), self.expert_stats()
        traffic = None if before is None or after is None else _traffic(after - before, count * self.batch)
        return Round(prefilled - began, ended - prefilled, traffic)

    def prefill(self, ids: list[int]) -> None:
        """Drop all sequences, then prefill a prompt."""
        self._end()
        self.scheduler.prefix_cache.clear()
        vocab = self.engine.model.config.vocab
        # prompts share nothing: equal tokens would go to the same experts
        prompts = [tuple(ids), *(_prompt(len(ids), vocab, seed) for seed in range(1, self.batch))]
        if self.trace is not None:
            prompts = [tuple(self.trace.prompt(len(ids) + sequence)[: len(ids)]) for sequence in range(self.batch)]
        self._jobs = [self.scheduler.submit(Request(prompt, self._sampling()), self._events.append) for prompt in prompts]
        while any(job.kv_sequence is None or job.uncomputed for job in self._jobs):
            self.scheduler.step(decode=False)
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()

    def decode(self, count: int) -> None:
        """Decode `count` tokens of each sequence."""
        self._events.clear()
        while len(self._events) < count * self.batch:
            self.scheduler.step()

    def costs(self) -> dict[str, Cost]:
        """Profile the next step by op."""
        sequences = [job.ids for job in self._jobs]
        self._end()
        starts = [self.scheduler.prefix_cache.open(ids) for ids in sequences]
        for start, ids in zip(starts, sequences, strict=True):
            if rest := ids[start.hit_tokens : -1]:
                self.engine.prefill([start.sequence], [rest])
        batch = self.engine.cache.batch([start.sequence for start in starts])
        found = profile_step(self.engine, batch, [ids[-1] for ids in sequences])
        for start in starts:
            start.sequence.close()
        return found

    def _sampling(self) -> Sampling:
        if self.experts is None or self.trace is not None:
            return Sampling(ignore_eos=True)
        self._seed += 1
        return Sampling(ignore_eos=True, temperature=1.0, seed=self._seed)

    def expert_stats(self) -> ExpertCacheStats | None:
        """Return the statistics of the expert cache so far; None if all experts are resident."""
        return None if self.experts is None else self.experts.cache_stats().total

    def cache_nbytes(self) -> int:
        return sum(job.kv.nbytes for job in self._jobs)

    def _end(self) -> None:
        for job in self._jobs:
            self.scheduler.cancel(job)
        self.scheduler.step()
        self._jobs = []


class LlamaCpp:
    """llama.cpp on the same file, with as many threads; by the package xllamacpp, whose server reports its times."""

    name, batch = "llama.cpp", 1

    def __init__(self, path: Path, context: int, threads: int):
        from xllamacpp import CommonParams, Server

        params = CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = str(path), context, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.verbosity = QUIET
        self._server = Server(params)

    def compile(self, lengths: list[int]) -> None:
        pass

    def run(self, ids: list[int], count: int) -> Round:
        # the first token comes with the prompt, so that decode needs one more
        request = {"prompt": ids, "n_predict": count + 1, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        found = self._server.handle_completions(request)["timings"]
        return Round(found["prompt_ms"] / 1000, found["predicted_ms"] / 1000 * count / found["predicted_n"])

    def cache_nbytes(self) -> None:
        return None


def measure(
    contenders: list[Contender], lengths: list[int], vocab: int, tokens: int, repeat: int, progress: Callable[[str], None]
) -> Iterator[Speed]:
    """Time all contenders alternately at each length, `repeat` times, and yield the best of each."""
    for each in contenders:
        progress(f"{each.name}: warming up")
        each.compile([WARM_UP, *lengths])
        each.run(list(_prompt(WARM_UP, vocab)), WARM_UP)
    for length in lengths:
        ids = list(_prompt(length, vocab))
        rounds: dict[str, list[Round]] = {each.name: [] for each in contenders}
        for round_ in range(repeat):
            for each in contenders:
                progress(f"{each.name}: {length} tokens, round {round_ + 1}")
                rounds[each.name].append(each.run(ids, tokens))
        for each in contenders:
            prefill_s = min(found.prefill_s for found in rounds[each.name])
            best = min(rounds[each.name], key=lambda found: found.decode_s)
            rates = each.batch * length / prefill_s, each.batch * tokens / best.decode_s
            yield Speed(each.name, length, each.batch, *rates, each.cache_nbytes(), best.traffic)


def _traffic(stats: ExpertCacheStats, tokens: int) -> ExpertTraffic:
    """Return the means of a round of so many tokens."""
    missing = stats.misses + stats.prefetched
    used = max(stats.hits + missing, 1)
    rest = stats.nbytes / tokens, stats.on_cpu / tokens, stats.prefetched / tokens
    return ExpertTraffic(stats.hits / used, missing / tokens, *rest)


def copy_bandwidth(device: torch.device) -> float:
    """Measure copies from pinned host memory to a GPU, in bytes per second."""
    source = torch.empty(COPIED_NBYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPIED_NBYTES, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return COPIED_NBYTES / min(seconds)


def check_lengths(lengths: list[int], tokens: int, context: int) -> None:
    """Refuse lengths that exceed the context."""
    most = max(lengths) + tokens
    if most > context:
        raise ContextError(f"a sequence of {most} tokens does not fit the context of {context}. Give --context {most} or more.")


@cache
def _prompt(length: int, vocab: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(f"{length} {seed}").choices(range(vocab), k=length))
