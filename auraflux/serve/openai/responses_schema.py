"""Schemas of /v1/responses. Fields that this server does not use are accepted and ignored."""

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from auraflux.serve.openai.schema import ApiModel, Budget, PositiveInt

CHOICES = ("auto", "none", "required")


# a union would report an error per branch; items are validated where they are converted
def _text_or_items(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError("it must be a string or a list of items")
    return value


def _word_or_object(value: Any) -> Any:
    if not isinstance(value, dict) and (not isinstance(value, str) or value not in CHOICES):
        raise ValueError(f"it must be one of {', '.join(CHOICES)}, or an object")
    return value


Input = Annotated[str | list[Any], PlainValidator(_text_or_items, json_schema_input_type=str | list[dict[str, Any]])]
Choice = Annotated[
    str | dict[str, Any],
    PlainValidator(_word_or_object, json_schema_input_type=Literal["auto", "none", "required"] | dict[str, Any]),
]


class TextFormat(ApiModel):
    """Constraint on the answer; `schema` with type "json_schema"."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class Text(ApiModel):
    """Settings of the answer's text."""

    format: TextFormat | None = None


class Effort(ApiModel):
    """Reasoning effort, and the most tokens of reasoning."""

    effort: str | None = Field(default=None, max_length=32)
    max_tokens: Budget | None = None


class ResponsesRequest(ApiModel):
    """A conversation to answer. The server is stateless, so each request carries the complete history."""

    model: str | None = None
    input: Input
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Effort | None = None
    max_output_tokens: PositiveInt | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    stream: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None

    @property
    def named(self) -> str | None:
        """Owner of the request, if the client names one."""
        return self.user or self.safety_identifier or self.prompt_cache_key


class ResponseReply(ApiModel):
    """An answer: items of type reasoning, message and function_call, and the request's settings."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
