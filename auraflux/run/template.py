"""Chat templates: from messages to the text a model was trained on. A template sees nothing but plain data (see sandbox.py)."""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.sandbox import SecurityError

from auraflux.errors import InputError, TemplateError
from auraflux.run.sandbox import Refused, Sandbox, deadline

MAX_SECONDS = 10.0
REASONING = ("reasoning_content", "thinking", "reasoning")


class Template:
    """A chat template, ready to render."""

    def __init__(self, source: str):
        if not isinstance(source, str):
            raise TemplateError(f"The chat template is {type(source).__name__}, not text.")
        self.source = source
        try:
            self._compiled = Sandbox().from_string(source)
        except jinja2.TemplateSyntaxError as err:
            raise TemplateError(f"The chat template has an error in line {err.lineno}: {_sentence(err)}") from err
        # what the compiler cannot digest, such as ten thousand brackets, comes out in many ways
        except Exception as err:
            raise TemplateError(f"The chat template cannot be compiled: {_sentence(err)}") from err

    def render(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        """Give the text of these messages; `values` are what else the template may ask for."""
        try:
            plain, given = _plain(list(messages)), _plain(values)
        except RecursionError as err:
            raise InputError("The messages are lists within lists too deep for a chat template.") from err
        for message in plain:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise InputError(f"A message is a dict with a 'role' and a 'content', not {message!r:.80}.")
        seen = {"messages": [_with_reasoning(message) for message in plain], "tools": None, "documents": None, **given}
        try:
            with deadline(MAX_SECONDS):
                return self._compiled.render(seen)
        except Refused as err:
            raise TemplateError(f"The chat template refuses the messages: {_sentence(err)}") from err
        except (SecurityError, RecursionError, MemoryError) as err:
            raise TemplateError(f"The chat template was stopped: {_sentence(err)}") from err
        # a template is a program: it may fail in any way
        except Exception as err:
            raise TemplateError(f"The chat template failed: {_sentence(err)}") from err


def _plain(value: Any) -> Any:
    """A copy made of nothing but what JSON has: other objects have methods a template could call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    raise InputError(f"A chat template can be given text, numbers, lists and dicts, not {type(value).__name__}.")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Templates read what a model thought under different names."""
    found = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _sentence(err: Exception) -> str:
    line = " ".join(str(err).split()) or type(err).__name__
    return line if line.endswith((".", "!", "?")) else f"{line}."
