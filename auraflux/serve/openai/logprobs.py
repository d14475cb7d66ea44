"""Logprobs in OpenAI's formats."""

from collections.abc import Sequence
from typing import Any

from auraflux.engine.request import TokenLogprob
from auraflux.tokenizer.tokenizer import Tokenizer

# JSON has no infinity; OpenAI returns this value for tokens of probability near 0
LEAST = -9999.0


def chat_logprob(tokenizer: Tokenizer, logprob: TokenLogprob) -> dict[str, Any]:
    """Return one token's entry in Chat Completions format."""
    top = [_token(tokenizer, token, value) for token, value in logprob.top]
    return {**_token(tokenizer, logprob.token, logprob.logprob), "top_logprobs": top}


def completion_logprobs(tokenizer: Tokenizer | None, logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, list[Any]]:
    """Return tokens in Completions format, as parallel lists; `offset` is the length of the text before them."""
    lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for each in logprobs:
        text = _text(tokenizer, each.token)
        lists["tokens"].append(text)
        lists["token_logprobs"].append(max(each.logprob, LEAST))
        lists["top_logprobs"].append(_by_text(tokenizer, each.top))
        lists["text_offset"].append(offset)
        offset += len(text)
    return lists


def echoed_logprobs(
    tokenizer: Tokenizer | None, prompt: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> dict[str, list[Any]]:
    """Return a prompt's tokens in Completions format; the first one has no log probability."""
    first = _text(tokenizer, prompt[0])
    rest = completion_logprobs(tokenizer, logprobs, len(first))
    before = {"tokens": first, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
    return {name: [before[name], *values] for name, values in rest.items()}


def prompt_logprobs(tokenizer: Tokenizer | None, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
    """Return a prompt's tokens in vLLM's format: the likeliest and its own at each position, by id."""
    found: list[dict[str, Any] | None] = [None]
    for each in logprobs:
        ranked = [*((token, value, rank) for rank, (token, value) in enumerate(each.top, 1))]
        if each.token not in dict(each.top):
            ranked.append((each.token, each.logprob, each.rank or 0))
        found.append({str(token): _ranked(tokenizer, token, value, rank) for token, value, rank in ranked})
    return found


def _ranked(tokenizer: Tokenizer | None, token: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": _text(tokenizer, token)}


def _by_text(tokenizer: Tokenizer | None, top: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Return log probabilities by text; of tokens with the same text the likeliest counts."""
    found: dict[str, float] = {}
    for token, logprob in top:
        found.setdefault(_text(tokenizer, token), max(logprob, LEAST))
    return found


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    encoded = tokenizer.piece(token)
    return {"token": encoded.decode(errors="replace"), "logprob": max(logprob, LEAST), "bytes": list(encoded)}


def _text(tokenizer: Tokenizer | None, token: int) -> str:
    """Return a token's text, or its id for a model without a tokenizer."""
    return f"token_id:{token}" if tokenizer is None else tokenizer.piece(token).decode(errors="replace")
