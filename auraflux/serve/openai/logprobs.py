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
        lists["top_logprobs"].append({_text(tokenizer, token): max(logprob, LEAST) for token, logprob in each.top})
        lists["text_offset"].append(offset)
        offset += len(text)
    return lists


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    encoded = tokenizer.piece(token)
    return {"token": encoded.decode(errors="replace"), "logprob": max(logprob, LEAST), "bytes": list(encoded)}


def _text(tokenizer: Tokenizer | None, token: int) -> str:
    """Return a token's text, or its id for a model without a tokenizer."""
    return f"token_id:{token}" if tokenizer is None else tokenizer.piece(token).decode(errors="replace")
