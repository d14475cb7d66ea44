"""Chat templates: from messages to the prompt format of a model.

A template comes with the weights and is untrusted code. It sees JSON values only and runs in a sandbox (template_sandbox.py),
in a process with a time and a memory limit (template_process.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from auraflux.errors import InputError, TemplateError
from auraflux.tokenizer.template_process import process

MAX_SOURCE_LENGTH = 1 << 22  # characters
MAX_DEPTH = 200  # of nested lists
REASONING = ("reasoning_content", "thinking", "reasoning")


def render(source: str, messages: Sequence[Mapping[str, Any]], /, **values: Any) -> str:
    """Render messages as prompt text; `values` are further variables of the template."""
    if not isinstance(source, str):
        raise TemplateError(f"The chat template is {type(source).__name__}, not a string.")
    if len(source) > MAX_SOURCE_LENGTH:
        raise TemplateError(f"The chat template has {len(source):,} characters; the limit is {MAX_SOURCE_LENGTH:,}.")
    copied, variables = _json_copy(list(messages)), _json_copy(values)
    for message in copied:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(f"A message must be a dict with 'role' and 'content', not {message!r:.80}.")
    context = {"messages": [_with_reasoning(message) for message in copied], "tools": None, "documents": None, **variables}
    return process.render(source, context)


def _json_copy(value: Any, depth: int = 0) -> Any:
    """Copy a value with JSON types only: other objects have methods that a template could call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if depth == MAX_DEPTH:
        raise InputError(f"The messages are nested deeper than {MAX_DEPTH} levels.")
    if isinstance(value, Mapping):
        return {_json_copy(key, depth + 1): _json_copy(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json_copy(each, depth + 1) for each in value]
    raise InputError(f"A chat template takes strings, numbers, lists and dicts, not {type(value).__name__}.")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Copy the reasoning to every key that templates read it from."""
    found = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}
