"""Request schemas of OpenAI's APIs. Fields that this server does not use are accepted and ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = list[Token]
Budget = Annotated[int, Field(ge=0, lt=1 << 31)]
PositiveInt = Annotated[int, Field(ge=1, lt=1 << 31)]


class ApiModel(BaseModel):
    """Base of all API objects: unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class ImageUrl(ApiModel):
    """An image: a data URL, or an http(s) URL where the server fetches those."""

    url: str


class ContentPart(ApiModel):
    """A part of a message: text, or an image of a user or a tool."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None


class CalledFunction(ApiModel):
    name: str
    arguments: str | dict[str, Any] | None = None


class Call(ApiModel):
    """A tool call in an earlier assistant message."""

    id: str | None = None
    function: CalledFunction


class Message(ApiModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class Function(ApiModel):
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(ApiModel):
    type: Literal["function"] = "function"
    function: Function


class ChosenFunction(ApiModel):
    name: str


class ToolChoice(ApiModel):
    """The one tool to call."""

    type: Literal["function"] = "function"
    function: ChosenFunction


class JsonSchema(ApiModel):
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(ApiModel):
    """Constraint on the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Grammar(ApiModel):
    """A grammar that constrains the answer: Lark, a regular expression, or a JSON schema."""

    type: Literal["lark", "regex", "json_schema"]
    value: str | dict[str, Any]


class StreamOptions(ApiModel):
    include_usage: bool | None = None


class SamplingFields(ApiModel):
    """Sampling settings; missing fields have the model's defaults, see `default_sampling` of /v1/models."""

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
    n: PositiveInt | None = None
    max_tokens: PositiveInt | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    grammar: Grammar | str | None = None
    user: str | None = None


class Thinking(ApiModel):
    """Reasoning switch and limit, as in Anthropic's API."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"] = "enabled"
    budget_tokens: Budget | None = None


class ChatCompletionRequest(SamplingFields):
    """A conversation to answer."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_thinking_tokens: Budget | None = None
    thinking: Thinking | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None


class CompletionRequest(SamplingFields):
    """One or more prompts to complete, as text or as tokens."""

    prompt: str | Tokens | list[str] | list[Tokens]
    echo: bool | None = None
    suffix: str | None = None
    best_of: PositiveInt | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)
    # 0 with `echo` or `prompt_logprobs`: score the prompt only
    max_tokens: int | None = Field(default=None, ge=0, lt=1 << 31)


class EmbeddingsRequest(ApiModel):
    """One or more inputs to embed, as text or as tokens. `prompt_name` names a prompt of the model, put before each text."""

    input: str | Tokens | list[str] | list[Tokens]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: PositiveInt | None = None
    prompt_name: str | None = None
    user: str | None = None


class RankedDocument(ApiModel):
    """A document as an object."""

    text: str


class RerankRequest(ApiModel):
    """A query, and documents to order by their relevance to it. `max_tokens_per_doc` cuts documents that are longer.

    `instruction` says what makes a document relevant, in place of the model's default.
    """

    query: str
    documents: list[str | RankedDocument]
    model: str | None = None
    top_n: PositiveInt | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: PositiveInt | None = None
    instruction: Annotated[str, Field(max_length=10_000)] | None = None
    user: str | None = None


class TokenizeRequest(ApiModel):
    """A text or a conversation to tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class ExpertPlacementRequest(ApiModel):
    """A request to redistribute experts over ranks."""

    model: str | None = None


class DetokenizeRequest(ApiModel):
    """Tokens to decode."""

    model: str | None = None
    tokens: Tokens
