"""Which requests belong together: those whose prompts begin alike, so that one replica's prefix cache serves them all."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

TEXT = 256  # characters of a prompt without messages that name it; what is shorter is quickly read again
TOKENS = 64  # likewise
SESSION = "x-session-id"


def beginning(body: bytes, headers: Mapping[str, str]) -> str:
    """Name the conversation a request is part of; "" for a request that is part of none.

    A client may name it itself, by the header x-session-id or OpenAI's prompt_cache_key. Else it is named by what all of its
    requests begin with: the system's text and the first message of the user.
    """
    if headers.get(SESSION):
        return _digest(headers[SESSION])
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(asked, dict):
        return ""
    if asked.get("prompt_cache_key"):
        return _digest(asked["prompt_cache_key"])
    for name in ("messages", "input"):
        turns = asked.get(name)
        if isinstance(turns, list) and turns:
            return _digest([asked.get("system"), asked.get("instructions"), _until_asked(turns)])
        if isinstance(turns, str):
            # the client sends a list with this as its first message when the conversation goes on
            return _digest([None, asked.get("instructions"), [["user", turns]]])
    return _digest(_first(asked["prompt"])) if asked.get("prompt") else ""


def _until_asked(turns: list[Any]) -> list[Any]:
    """The messages up to the user's first, as pairs of who speaks and what is said."""
    found: list[Any] = []
    for turn in turns:
        if not isinstance(turn, dict):
            return [*found, turn]
        found.append([turn.get("role"), _plain(turn.get("content"))])
        if turn.get("role") == "user":
            break
    return found


def _plain(content: Any) -> Any:
    """One part of text alone means what the text means."""
    if (
        isinstance(content, list)
        and len(content) == 1
        and isinstance(content[0], dict)
        and isinstance(content[0].get("text"), str)
    ):
        return content[0]["text"]
    return content


def _first(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return prompt[:TEXT]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return _first(prompt[0])
    return prompt[:TOKENS] if isinstance(prompt, list) else prompt


def _digest(named: Any) -> str:
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:32]
