"""A chat request in one form for every API, with its messages in the form that chat templates take."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from auraflux.engine.sampling import Sampling
from auraflux.errors import InputError

BILLING = "x-anthropic-billing-header"
Message = dict[str, Any]


@dataclass(frozen=True)
class NamedTool:
    """A tool choice that names the one tool to call."""

    name: str


@dataclass(frozen=True)
class Format:
    """Constraint on the output.

    kind    "json" for any JSON object, "schema" for a JSON schema, "lark" or "regex" for a grammar
    source  the schema, or the grammar's text
    """

    kind: str
    source: Any = None


@dataclass(frozen=True)
class Conversation:
    """Messages to answer, and the settings of the answer.

    messages                as chat templates take them: {"role", "content", optionally "tool_calls", "tool_call_id", "name",
                            "reasoning_content"}; content is a string, or a user's or a tool's parts, some of them
                            {"type": "image", "image": ImageSource}; roles are system, user, assistant and tool
    tools                   in OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}
    tool_choice             "auto", "none", "required" or NamedTool
    parallel_tool_calls     whether one answer may hold several calls
    format                  constraint on the answer; None for free text
    count                   number of answers
    template_kwargs         further arguments of the chat template: enable_thinking, reasoning_effort, ...
    thinking_budget         most tokens of reasoning; None for no limit but that of a reasoning effort
    user                    owner of the request, for fair queueing
    continue_final_message  whether the answer continues the last message, an unfinished one of the assistant
    """

    messages: list[Message]
    sampling: Sampling = field(default_factory=Sampling)
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | NamedTool = "auto"
    parallel_tool_calls: bool = True
    format: Format | None = None
    count: int = 1
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    thinking_budget: int | None = None
    user: str = ""
    continue_final_message: bool = False


def without_billing(text: str) -> str:
    """Drop the system prompt line that some clients change in each request: it would defeat the prefix cache."""
    if BILLING not in text:
        return text
    return "\n".join(line for line in text.split("\n") if not line.lstrip().startswith(BILLING))


def system_message_variants(messages: list[Message]) -> Iterator[list[Message]]:
    """Yield the messages unchanged, then for templates that take a system message only first, or not at all."""
    yield messages
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system" and message["content"])
    rest = [message for message in messages if message["role"] != "system"]
    if len(rest) == len(messages):
        return
    merged: list[Message] = [{"role": "system", "content": system}, *rest]
    if merged != messages:
        yield merged
    if rest and rest[0]["role"] == "user":
        content = rest[0]["content"]
        both = f"{system}\n\n{content}" if isinstance(content, str) else [{"type": "text", "text": system}, *content]
        yield [{**rest[0], "content": both}, *rest[1:]]


def partial_reply(conversation: Conversation) -> tuple[str, str]:
    """Return reasoning and content of the reply to continue; refuse what cannot be continued."""
    last = conversation.messages[-1]
    reasoning, content = last.get("reasoning_content") or "", last["content"]
    if last["role"] != "assistant" or last.get("tool_calls") or not (reasoning or content):
        raise InputError(
            f"continue_final_message continues text of the assistant, but the last message is the {last['role']}'s"
            f"{' and has tool calls' if last.get('tool_calls') else ' and empty' if last['role'] == 'assistant' else ''}."
        )
    if conversation.format is not None or conversation.tool_choice not in ("auto", "none"):
        raise InputError("continue_final_message cannot be combined with response_format, grammar or a required tool call.")
    return reasoning, content
