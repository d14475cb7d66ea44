"""A syntax: how a family of models writes what it thinks, says and calls."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from auraflux.serve.deltas import CallArguments, Content, Reasoning, Said
from auraflux.serve.parse.calls import Calls, Reader
from auraflux.serve.parse.tagged import Tags
from auraflux.serve.parse.text import Steps, Text
from auraflux.serve.parse.thinking import THINK, Marks, thinking


def new_id() -> str:
    """Make the id of a call."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class Form:
    """How calls are written, for a grammar that must write them: opening, calls with `between` between them, closing.

    name       what stands before a tool's name
    arguments  between the name and the arguments
    end        behind the arguments
    between    None where there is one call at most
    tagged     the tags that each argument stands between, where they are not JSON
    """

    name: str = '{"name": "'
    arguments: str = '", "arguments": '
    end: str = "}"
    between: str | None = None
    opening: str = ""
    closing: str = ""
    tagged: Tags | None = None


@dataclass(frozen=True)
class Syntax:
    """What there is to know of a syntax.

    read     reads an answer
    shows    special tokens that must be in the text for it; all others are left out
    goes_on  tokens that end a message but not the text, also if the model names them among its ends
    form     how a call is written
    think    the marks around what is thought, the usual ones first
    thinks   whether the model may write them by itself
    begins   what the prompt's end writes of the answer stands behind this
    new_id   makes ids of calls
    """

    name: str
    read: Reader
    shows: tuple[str, ...] = ()
    goes_on: tuple[str, ...] = ()
    form: Form = Form()
    think: tuple[Marks, ...] = (THINK,)
    thinks: bool = False
    begins: str | None = None
    new_id: Callable[[], str] = new_id

    def __post_init__(self) -> None:
        object.__setattr__(self, "shows", (*self.shows, *(mark for each in self.think for mark in each)))

    def parser(
        self, prompt_tail: str, tools: Sequence[Mapping[str, Any]] | None = None, new_id: Callable[[], str] | None = None
    ) -> "Parser":
        """Make a parser of one answer to the prompt that ends with this; without tools nothing is a call."""
        written = prompt_tail.rpartition(self.begins)[2] if self.begins and self.begins in prompt_tail else ""
        text, calls = Text(written), Calls(tools, new_id or self.new_id)
        return Parser(text, self._steps(text, calls, prompt_tail))

    def _steps(self, text: Text, calls: Calls, prompt_tail: str) -> Steps[None]:
        if self.think:
            yield from thinking(text, self.think, prompt_tail)
        yield from self.read(text, calls)


class Parser:
    """Turns the text of one answer, however it is cut, into what is thought, said and called."""

    def __init__(self, text: Text, steps: Steps[None]):
        self._text, self._steps = text, steps

    def feed(self, text: str) -> list[Said]:
        """Take more of the text and tell what is sure by now."""
        self._text.push(text)
        return self._run()

    def finish(self) -> list[Said]:
        """Tell what was held back, because more might have come."""
        self._text.end()
        return self._run()

    def _run(self) -> list[Said]:
        said: list[Said] = []
        for step in self._steps:
            if step is None:
                break
            _add(said, step)
        return said


def _add(said: list[Said], step: Said) -> None:
    """Put text that belongs together together."""
    last = said[-1] if said else None
    match last, step:
        case (_, (Content(text="") | Reasoning(text="") | CallArguments(text=""))):
            pass
        case Content(text=before), Content(text=after):
            said[-1] = Content(before + after)
        case Reasoning(text=before), Reasoning(text=after):
            said[-1] = Reasoning(before + after)
        case CallArguments(index=one, text=before), CallArguments(index=other, text=after) if one == other:
            said[-1] = CallArguments(one, before + after)
        case _:
            said.append(step)
