"""Chat templates: from messages to the text a model was trained on.

A template comes with the weights and is a stranger's program. It sees nothing but plain data, runs in a sandbox (sandbox.py)
and in a process that has little time and memory (template_process.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from auraflux.errors import InputError, TemplateError
from auraflux.run.template_process import process

LONGEST_SOURCE = 1 << 22  # characters
DEEPEST = 200  # lists within lists
REASONING = ("reasoning_content", "thinking", "reasoning")


def render(source: str, messages: Sequence[Mapping[str, Any]], /, **values: Any) -> str:
    """Give the text of these messages; `values` are what else the template may ask for."""
    if not isinstance(source, str):
        raise TemplateError(f"The chat template is {type(source).__name__}, not text.")
    if len(source) > LONGEST_SOURCE:
        raise TemplateError(f"The chat template has {len(source):,} characters; at most {LONGEST_SOURCE:,} are taken.")
    plain, given = _plain(list(messages)), _plain(values)
    for message in plain:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(f"A message is a dict with a 'role' and a 'content', not {message!r:.80}.")
    seen = {"messages": [_with_reasoning(message) for message in plain], "tools": None, "documents": None, **given}
    return process.render(source, seen)


def _plain(value: Any, depth: int = 0) -> Any:
    """A copy made of nothing but what JSON has: other objects have methods a template could call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if depth == DEEPEST:
        raise InputError("The messages are lists within lists too deep for a chat template.")
    if isinstance(value, Mapping):
        return {_plain(key, depth + 1): _plain(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, depth + 1) for each in value]
    raise InputError(f"A chat template can be given text, numbers, lists and dicts, not {type(value).__name__}.")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Templates read what a model thought under different names."""
    found = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}
