"""What OpenAI's APIs are sent. Fields that this server has no use for are accepted and not read."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = list[Token]
Whole = Annotated[int, Field(ge=1, lt=1 << 31)]


class Part(BaseModel):
    """Any object of a request: what is not known is left out."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class ContentPart(Part):
    """A piece of a message; only those of text are read."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Part):
    name: str
    arguments: str | dict[str, Any] | None = None


class Call(Part):
    """A call that an assistant made in an earlier turn."""

    id: str | None = None
    function: CalledFunction


class Message(Part):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class Function(Part):
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Part):
    type: Literal["function"] = "function"
    function: Function


class ChosenFunction(Part):
    name: str


class ToolChoice(Part):
    """The one tool to call."""

    type: Literal["function"] = "function"
    function: ChosenFunction


class JsonSchema(Part):
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Grammar(Part):
    """A grammar that the answer must fit: Lark's, a regular expression, or a JSON schema."""

    type: Literal["lark", "regex", "json_schema"]
    value: str | dict[str, Any]


class StreamOptions(Part):
    include_usage: bool | None = None


class SamplingFields(Part):
    """How a text is chosen; what is left out is as OpenAI has it, a temperature of 1 among it."""

    model: str | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-100, le=100)
    frequency_penalty: float | None = Field(default=None, ge=-100, le=100)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    stop: str | list[str] | None = None
    n: Whole | None = None
    max_tokens: Whole | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    grammar: Grammar | str | None = None
    user: str | None = None


class ChatRequest(SamplingFields):
    """A conversation to be answered."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(SamplingFields):
    """Texts to be continued: one or more, as text or as tokens."""

    prompt: str | Tokens | list[str] | list[Tokens]
    echo: bool | None = None
    suffix: str | None = None
    best_of: Whole | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)


class TokenizeRequest(Part):
    """A text, or a conversation, to be made into tokens."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class DealRequest(Part):
    """A wish that experts be dealt out to ranks again."""

    model: str | None = None


class DetokenizeRequest(Part):
    """Tokens to be made into text."""

    model: str | None = None
    tokens: Tokens
