"""A syntax: how a model family delimits reasoning, content and tool calls."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from auraflux.engine.request import ThinkingBudget, ThinkTags
from auraflux.serve.chat.deltas import Content, ParsedDelta, Reasoning, ToolCallArguments
from auraflux.serve.parse.argument_tags import Tags
from auraflux.serve.parse.calls import CallParser, ToolCalls
from auraflux.serve.parse.text import Steps, TextStream
from auraflux.serve.parse.thinking import THINK, thinking
from auraflux.serve.parse.thinking import ThinkTags as Pair


def new_id() -> str:
    """Return a new tool call id."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class CallTemplate:
    """Text around tool calls, for grammars that enforce them: opening, calls joined by `between`, closing.

    name           before the tool's name
    arguments      between the name and the arguments
    end            after the arguments
    between        None for syntaxes with at most one call
    argument_tags  tags around each argument, where arguments are not JSON
    """

    name: str = '{"name": "'
    arguments: str = '", "arguments": '
    end: str = "}"
    between: str | None = None
    opening: str = ""
    closing: str = ""
    argument_tags: Tags | None = None


@dataclass(frozen=True)
class Syntax:
    """A model family's output syntax.

    parse            parser of an answer
    visible_tokens   special tokens that the parser needs in the decoded text
    non_stop_tokens  tokens that end a message but not the generation, even if the model lists them as stop tokens
    call_template    text around tool calls
    think_tags       tags around reasoning, the usual pair first
    may_think        whether the model may open reasoning by itself
    reply_header     text in the prompt after which the reply begins
    think_end        text that ends a message of reasoning, with reply_channels
    reply_channels   text before reasoning, between reasoning and content, and before content; None for think_tags
    new_id           makes tool call ids
    """

    name: str
    parse: CallParser
    visible_tokens: tuple[str, ...] = ()
    non_stop_tokens: tuple[str, ...] = ()
    call_template: CallTemplate = CallTemplate()
    think_tags: tuple[Pair, ...] = (THINK,)
    may_think: bool = False
    reply_header: str | None = None
    reply_channels: tuple[str, str, str] | None = None
    think_end: str = ""
    new_id: Callable[[], str] = new_id

    def __post_init__(self) -> None:
        object.__setattr__(self, "visible_tokens", (*self.visible_tokens, *(tag for pair in self.think_tags for tag in pair)))

    def reply_opening(self, prompt_tail: str, reasoning: str, content: str) -> str:
        """Return the text between the prompt and the last part of an unfinished reply: its content, or its reasoning alone."""
        if self.reply_channels is not None:
            before, between, only_content = self.reply_channels
        else:
            opened = next((tags for tags in self.think_tags if prompt_tail.rstrip().endswith(tags[0])), None)
            first, last = opened or self.think_tags[0]
            before, between = "" if opened else f"{first}\n", f"\n{last}\n\n"
            only_content = between if opened else ""
        if not content:
            return before
        return f"{before}{reasoning}{between}" if reasoning else only_content

    def thinking_budget(self, tokens: int, prompt_tail: str, encode: Callable[[str], Sequence[int]]) -> ThinkingBudget | None:
        """Return the limit of reasoning in an answer to a prompt that ends in `prompt_tail`; None if there is no reasoning.

        encode  tokenizes a text without adding tokens
        """
        if self.reply_channels is not None:
            opening, to_content, content = self.reply_channels
            # the model may choose another channel after its reasoning, such as a call; but not reasoning once more
            once, again = to_content.removesuffix(content), to_content
            tags: tuple[ThinkTags, ...] = (ThinkTags(opening, self.think_end, tuple(encode(once)), tuple(encode(again))),)
        else:
            closings = [(pair, tuple(encode(f"\n{pair[1]}\n\n"))) for pair in self.think_tags]
            tags = tuple(ThinkTags(*pair, ids, ids) for pair, ids in closings)
        opened = next((each for each in tags if prompt_tail.rstrip().endswith(each.opening)), None)
        if opened is None and not self.may_think and self.reply_channels is None:
            return None
        return ThinkingBudget(tokens, tags, opened, reopens=self.reply_channels is not None)

    def parser(
        self,
        prompt_tail: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        new_id: Callable[[], str] | None = None,
        resumed: bool = False,
    ) -> "Parser":
        """Make a parser for one answer to a prompt that ends in `prompt_tail`; without tools there are no calls.

        resumed  whether the answer began in the prompt, after `prompt_tail`
        """
        prefilled = (
            prompt_tail.rpartition(self.reply_header)[2] if self.reply_header and self.reply_header in prompt_tail else ""
        )
        text, calls = TextStream(prefilled), ToolCalls(tools, new_id or self.new_id)
        parser = Parser(text, self._steps(text, calls, prompt_tail))
        if resumed:
            # past the start of the text, white space and calls there have no special meaning
            parser.feed(".")
        return parser

    def _steps(self, text: TextStream, calls: ToolCalls, prompt_tail: str) -> Steps[None]:
        if self.think_tags:
            yield from thinking(text, self.think_tags, prompt_tail)
        yield from self.parse(text, calls)


class Parser:
    """Streaming parser of one answer into deltas; the result does not depend on how the text was chunked."""

    def __init__(self, text: TextStream, steps: Steps[None]):
        self._text, self._steps = text, steps

    def feed(self, text: str) -> list[ParsedDelta]:
        """Add text and return the deltas that are certain."""
        self._text.push(text)
        return self._run()

    def finish(self) -> list[ParsedDelta]:
        """End the text and return the deltas that were held back."""
        self._text.end()
        return self._run()

    def _run(self) -> list[ParsedDelta]:
        deltas: list[ParsedDelta] = []
        for step in self._steps:
            if step is None:
                break
            _add(deltas, step)
        return deltas


def _add(deltas: list[ParsedDelta], step: ParsedDelta) -> None:
    """Append a delta, merged with the last one where both extend the same text."""
    last = deltas[-1] if deltas else None
    match last, step:
        case (_, (Content(text="") | Reasoning(text="") | ToolCallArguments(text=""))):
            pass
        case Content(text=before), Content(text=after):
            deltas[-1] = Content(before + after)
        case Reasoning(text=before), Reasoning(text=after):
            deltas[-1] = Reasoning(before + after)
        case ToolCallArguments(index=one, text=before), ToolCallArguments(index=other, text=after) if one == other:
            deltas[-1] = ToolCallArguments(one, before + after)
        case _:
            deltas.append(step)
