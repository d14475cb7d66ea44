"""The loop that writes: prompts go in one after the other, then all texts grow together by a token a step."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from auraflux.cache import Batch
from auraflux.errors import CacheFull
from auraflux.run.device import Arriving
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
    yield from grow(engine, streams, scores, stats)


def grow(engine: Engine, streams: list[Stream], scores: Tensor, stats: Stats) -> Iterator[tuple[Stream, str]]:
    """Continue streams whose prompts were read.

    A GPU begins the next step before the tokens of this one are known here, unless they are the last. A stream that then ends
    has given its sequence one token more than it need have: the one it ended with.

    scores  [B, V]  of the first token of each
    """
    live, batch = streams, engine.cache.batch([stream.sequence for stream in streams])
    sampler = Sampler([stream.row for stream in streams])
    while True:
        began = time.perf_counter()
        chosen = sampler(scores)
        arriving = Arriving(chosen)
        ahead = _begun(engine, batch, live, chosen)
        tokens = arriving.wait()
        stats.tokens += len(tokens)
        stats.decode_s += time.perf_counter() - began
        for stream, token in zip(live, tokens, strict=True):
            yield stream, stream.take(token)
        going = [number for number, stream in enumerate(live) if stream.finish is None]
        if not going:
            return
        began = time.perf_counter()
        if len(going) < len(live):
            live = [live[number] for number in going]
            batch = engine.cache.batch([stream.sequence for stream in live])
            sampler = Sampler([stream.row for stream in live])
            ahead = ahead[going] if ahead is not None else None
        scores = engine.decode(batch, [stream.tokens[-1] for stream in live]) if ahead is None else ahead
        stats.decode_s += time.perf_counter() - began


def _begun(engine: Engine, batch: Batch, live: list[Stream], chosen: Tensor) -> Tensor | None:
    """Begin the step after tokens that only the device knows, if that is of use: its scores [B, V]."""
    if not engine.decoder.ahead(batch) or any(stream.last for stream in live):
        return None
    try:
        return engine.decode(batch, chosen)
    except CacheFull:
        # the tokens are given out first; then it is met again, unless some stream ended and made room
        return None
