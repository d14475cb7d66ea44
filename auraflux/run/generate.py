"""The loop that writes: prompts go in one after the other, then all texts grow together by a token a step."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from auraflux.run.engine import Engine
from auraflux.run.sampler import Sampler
from auraflux.run.stream import Stream
from auraflux.weights.traffic import ExpertTraffic


@dataclass
class Stats:
    """What a generation took.

    prompt_tokens   that went through the model
    reused_tokens   of the prompt that the cache still had
    tokens          chosen, over all texts
    cache_nbytes    of all that the cache holds
    plain_nbytes    that the same positions would take uncompressed, in bf16
    experts         what was read of a packed model's experts; None where all are in memory
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefill_s: float = 0.0
    tokens: int = 0
    decode_s: float = 0.0
    cache_nbytes: int = 0
    plain_nbytes: int = 0
    experts: ExpertTraffic | None = None

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first, which is the prompt's work."""
        return max(self.tokens - 1, 0) / self.decode_s if self.decode_s else 0.0


def write(
    engine: Engine, streams: list[Stream], stats: Stats, advance: Callable[[int], None] = lambda tokens: None
) -> Iterator[tuple[Stream, str]]:
    """Continue all streams to their ends; give each token's piece of text, often none; the last has `finish` set."""
    began = time.perf_counter()
    scores = torch.stack([engine.prefill(stream.sequence, stream.prompt, advance) for stream in streams])
    stats.prompt_tokens += sum(len(stream.prompt) for stream in streams)
    stats.prefill_s += time.perf_counter() - began
    live, batch = streams, engine.cache.batch([stream.sequence for stream in streams])
    sampler = Sampler([stream.row for stream in streams])
    while True:
        began = time.perf_counter()
        chosen = sampler(scores).tolist()
        stats.tokens += len(chosen)
        stats.decode_s += time.perf_counter() - began
        for stream, token in zip(live, chosen, strict=True):
            yield stream, stream.take(token)
        going = [stream for stream in live if stream.finish is None]
        if not going:
            return
        began = time.perf_counter()
        if len(going) < len(live):
            live, batch = going, engine.cache.batch([stream.sequence for stream in going])
            sampler = Sampler([stream.row for stream in going])
        scores = engine.decode(batch, [stream.tokens[-1] for stream in live])
        stats.decode_s += time.perf_counter() - began
