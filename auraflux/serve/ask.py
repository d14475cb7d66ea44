"""A conversation to be answered, in one form whatever API it came through."""

from dataclasses import dataclass, field
from typing import Any

from auraflux.run.sampling import Sampling


@dataclass(frozen=True)
class Named:
    """A tool choice that names the one tool to call."""

    name: str


@dataclass(frozen=True)
class Format:
    """What the answer must be.

    kind    "json" for any JSON object, "schema" for what a JSON schema describes, "lark", "regex" for a grammar
    source  the schema, or the text of the grammar
    """

    kind: str
    source: Any = None


@dataclass(frozen=True)
class Ask:
    """What a client wants to be told.

    messages     as chat templates read them: {"role", "content", and maybe "tool_calls", "tool_call_id", "name",
                 "reasoning_content"}; content is a string; roles are system, user, assistant and tool
    tools        as OpenAI writes them: {"type": "function", "function": {"name", "description", "parameters"}}
    tool_choice  "auto", "none", "required" or Named
    parallel     whether one answer may hold several calls
    format       what the answer must be; None for text
    count        of answers wanted
    values       what else the template is given: enable_thinking, reasoning_effort, ...
    user         whose it is, for fair queueing
    """

    messages: list[dict[str, Any]]
    sampling: Sampling = field(default_factory=Sampling)
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | Named = "auto"
    parallel: bool = True
    format: Format | None = None
    count: int = 1
    values: dict[str, Any] = field(default_factory=dict)
    user: str = ""
