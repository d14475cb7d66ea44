"""What answers took, as clients are told."""

from collections.abc import Sequence
from typing import Any

from auraflux.run.request import Figures
from auraflux.serve.answer import Answer


def usage_of(answers: Sequence[Answer], count: int = 1) -> dict[str, Any]:
    """Add up the tokens of answers that have ended; each prompt has `count` of them and is counted once."""
    figures = [_figures(answer) for answer in answers]
    prompt, written = sum(each.prompt_tokens for each in figures[::count]), sum(each.tokens for each in figures)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in figures[::count])},
        "completion_tokens_details": {"reasoning_tokens": sum(answer.reasoning_tokens for answer in answers)},
    }


def timings_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tell how long the first answer took, what all take in the cache, and what became of guesses at them."""
    every = [_figures(answer) for answer in answers]
    first = every[0]
    decode_s = first.total_s - first.first_s
    return {
        "queue_s": first.queue_s,
        "first_s": first.first_s,
        "total_s": first.total_s,
        "tokens_per_s": (first.tokens - 1) / decode_s if decode_s > 0 and first.tokens > 1 else None,
        "cache_nbytes": sum(each.cache_nbytes for each in every),
        "plain_nbytes": sum(each.plain_nbytes for each in every),
        "cached_tokens": first.cached_tokens,
        "steps": sum(each.steps for each in every),
        "drafted": sum(each.drafted for each in every),
        "accepted": sum(each.accepted for each in every),
    }


def _figures(answer: Answer) -> Figures:
    """An answer that was cut short may have none of its own."""
    return answer.finish.figures if answer.finish is not None else Figures(prompt_tokens=answer.prompt_tokens)
