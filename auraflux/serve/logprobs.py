"""Probabilities of tokens as OpenAI's APIs spell them."""

from collections.abc import Sequence
from typing import Any

from auraflux.run.request import Scored
from auraflux.run.tokenizer import Tokenizer

# JSON has no infinity; OpenAI writes this for what is as good as impossible
LEAST = -9999.0


def spelled(tokenizer: Tokenizer, scored: Scored) -> dict[str, Any]:
    """Spell one token of a chat with those in its place."""
    top = [_token(tokenizer, token, logprob) for token, logprob in scored.top]
    return {**_token(tokenizer, scored.token, scored.logprob), "top_logprobs": top}


def spelled_lists(tokenizer: Tokenizer | None, scored: Sequence[Scored], offset: int) -> dict[str, list[Any]]:
    """Spell the tokens of a completion as lists beside each other; `offset` is how long the text before them is."""
    made: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for each in scored:
        text = _text(tokenizer, each.token)
        made["tokens"].append(text)
        made["token_logprobs"].append(max(each.logprob, LEAST))
        made["top_logprobs"].append({_text(tokenizer, token): max(logprob, LEAST) for token, logprob in each.top})
        made["text_offset"].append(offset)
        offset += len(text)
    return made


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    piece = tokenizer.piece(token)
    return {"token": piece.decode(errors="replace"), "logprob": max(logprob, LEAST), "bytes": list(piece)}


def _text(tokenizer: Tokenizer | None, token: int) -> str:
    """A model without a tokenizer has only numbers."""
    return f"token_id:{token}" if tokenizer is None else tokenizer.piece(token).decode(errors="replace")
