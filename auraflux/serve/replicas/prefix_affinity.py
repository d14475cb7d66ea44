"""Prefix affinity: requests with a common prompt prefix share a key, so that one replica's prefix cache serves them all."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

PREFIX_CHARS = 256  # of a prompt without messages; shorter prefixes are cheap to prefill again
PREFIX_TOKENS = 64  # the same for a prompt of tokens
SESSION = "x-session-id"


def affinity_key(body: bytes, headers: Mapping[str, str]) -> str:
    """Return the affinity key of a request's conversation; "" for a request without one.

    A client may set it with the header x-session-id or OpenAI's prompt_cache_key. Otherwise it is a digest of the prefix that
    all requests of the conversation share: the system prompt and the first user message.
    """
    if headers.get(SESSION):
        return _digest(headers[SESSION])
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(request, dict):
        return ""
    if request.get("prompt_cache_key"):
        return _digest(request["prompt_cache_key"])
    for name in ("messages", "input"):
        messages = request.get(name)
        if isinstance(messages, list) and messages:
            return _digest([request.get("system"), request.get("instructions"), _first_messages(messages)])
        if isinstance(messages, str):
            # later requests of the conversation have this as the first message of a list
            return _digest([None, request.get("instructions"), [["user", messages]]])
    return _digest(_prefix(request["prompt"])) if request.get("prompt") else ""


def _first_messages(messages: list[Any]) -> list[Any]:
    """Return the messages up to the first user message, as pairs of role and content."""
    found: list[Any] = []
    for message in messages:
        if not isinstance(message, dict):
            return [*found, message]
        found.append([message.get("role"), _text_of(message.get("content"))])
        if message.get("role") == "user":
            break
    return found


def _text_of(content: Any) -> Any:
    """Return content with a single text part as its text, since both forms are equivalent."""
    if (
        isinstance(content, list)
        and len(content) == 1
        and isinstance(content[0], dict)
        and isinstance(content[0].get("text"), str)
    ):
        return content[0]["text"]
    return content


def _prefix(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return prompt[:PREFIX_CHARS]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return _prefix(prompt[0])
    return prompt[:PREFIX_TOKENS] if isinstance(prompt, list) else prompt


def _digest(prefix: Any) -> str:
    return hashlib.sha256(json.dumps(prefix, sort_keys=True).encode()).hexdigest()[:32]
