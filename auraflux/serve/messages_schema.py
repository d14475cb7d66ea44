"""What /v1/messages is sent: Anthropic's request. Fields it has and this server has no use for are accepted and not read."""

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from auraflux.serve.schema import Part, Whole


def _text_or_blocks(value: Any) -> Any:
    # a union of types would report what each of them misses, and blocks are looked at where they are read
    if not isinstance(value, str | list):
        raise ValueError("it must be a string or a list of blocks")
    return value


Blocks = Annotated[str | list[Any], PlainValidator(_text_or_blocks, json_schema_input_type=str | list[dict[str, Any]])]


class Turn(Part):
    """A message: text, or blocks of type text, thinking, tool_use and tool_result."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class CustomTool(Part):
    """A tool of the client's own; tools that Anthropic runs are refused."""

    name: str = Field(min_length=1, max_length=128)
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolUse(Part):
    """Whether tools are called; `name` with type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Part):
    """Whether the model thinks first. `budget_tokens` is not enforced."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None


class OutputFormat(Part):
    """A JSON schema that the answer must fit."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Part):
    """What the answer must be, and how much the model thinks."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Metadata(Part):
    """Whose request it is."""

    user_id: str | None = None


class CountRequest(Part):
    """A conversation whose tokens are counted."""

    model: str | None = None
    messages: list[Turn] = Field(min_length=1)
    system: Blocks | None = None
    tools: list[CustomTool] | None = None
    tool_choice: ToolUse | None = None
    thinking: Thinking | None = None
    output_format: OutputFormat | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest):
    """A conversation to be answered."""

    max_tokens: Whole
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31)
    stream: bool | None = None
    metadata: Metadata | None = None

    @property
    def user(self) -> str | None:
        return self.metadata.user_id if self.metadata else None


class MessageUsage(Part):
    """Tokens that an answer took; those of the prompt that were cached are not among input_tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageReply(Part):
    """An answer: blocks of type thinking, text and tool_use."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class CountReply(Part):
    """How many tokens a conversation has."""

    input_tokens: int


class MessageErrorDetail(Part):
    """What went wrong."""

    type: str
    message: str


class MessageError(Part):
    """An error as Anthropic spells it."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str | None
