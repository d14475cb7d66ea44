"""Token usage and timings in responses."""

from collections.abc import Sequence
from typing import Any

from auraflux.engine.request import RequestStats
from auraflux.serve.chat.output import ChatOutput


def usage_of(outputs: Sequence[ChatOutput], count: int = 1) -> dict[str, Any]:
    """Return the tokens of finished outputs; each prompt has `count` of them and is counted once."""
    stats = [stats_of(output) for output in outputs]
    prompt, generated = sum(each.prompt_tokens for each in stats[::count]), sum(each.tokens for each in stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in stats[::count])},
        "completion_tokens_details": {"reasoning_tokens": sum(output.reasoning_tokens for output in outputs)},
    }


def timings_of(outputs: Sequence[ChatOutput]) -> dict[str, Any]:
    """Return the latencies of the first output, and the cache bytes and draft tokens of all."""
    every = [stats_of(output) for output in outputs]
    first = every[0]
    decode_s = first.total_s - first.ttft_s
    return {
        "queue_s": first.queue_s,
        "first_s": first.ttft_s,
        "total_s": first.total_s,
        "tokens_per_s": (first.tokens - 1) / decode_s if decode_s > 0 and first.tokens > 1 else None,
        "cache_nbytes": sum(each.cache_nbytes for each in every),
        "plain_nbytes": sum(each.uncompressed_nbytes for each in every),
        "cached_tokens": first.cached_tokens,
        "steps": sum(each.steps for each in every),
        "drafted": sum(each.drafted for each in every),
        "accepted": sum(each.accepted for each in every),
    }


def stats_of(output: ChatOutput) -> RequestStats:
    """Return an output's statistics; an interrupted one may have none."""
    return output.finish.stats if output.finish is not None else RequestStats(prompt_tokens=output.prompt_tokens)
