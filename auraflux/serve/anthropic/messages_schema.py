"""Schemas of /v1/messages. Fields that this server does not use are accepted and ignored."""

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from auraflux.serve.openai.schema import ApiModel, PositiveInt, Thinking


def _text_or_blocks(value: Any) -> Any:
    # a union would report an error per branch; blocks are validated where they are converted
    if not isinstance(value, str | list):
        raise ValueError("it must be a string or a list of blocks")
    return value


Blocks = Annotated[str | list[Any], PlainValidator(_text_or_blocks, json_schema_input_type=str | list[dict[str, Any]])]


class InputMessage(ApiModel):
    """A message: text, or blocks of type text, thinking, tool_use and tool_result."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class CustomTool(ApiModel):
    """A client-side tool; tools hosted by Anthropic are refused."""

    name: str = Field(min_length=1, max_length=128)
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolUse(ApiModel):
    """Tool choice; `name` with type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(ApiModel):
    """A JSON schema that constrains the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(ApiModel):
    """Constraint on the answer, and reasoning effort."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Metadata(ApiModel):
    """Owner of the request."""

    user_id: str | None = None


class CountRequest(ApiModel):
    """A conversation to count the tokens of."""

    model: str | None = None
    messages: list[InputMessage] = Field(min_length=1)
    system: Blocks | None = None
    tools: list[CustomTool] | None = None
    tool_choice: ToolUse | None = None
    thinking: Thinking | None = None
    output_format: OutputFormat | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest):
    """A conversation to answer."""

    max_tokens: PositiveInt
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31)
    stream: bool | None = None
    metadata: Metadata | None = None

    @property
    def user(self) -> str | None:
        return self.metadata.user_id if self.metadata else None


class MessageUsage(ApiModel):
    """Token usage; input_tokens excludes cached prompt tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageReply(ApiModel):
    """An answer: blocks of type thinking, text and tool_use."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class CountReply(ApiModel):
    """Number of tokens in a conversation."""

    input_tokens: int


class MessageErrorDetail(ApiModel):
    """Type and message of an error."""

    type: str
    message: str


class MessageError(ApiModel):
    """An error in Anthropic's format."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str | None
