"""Schemas of Ollama's API. Fields that this server does not use are accepted and ignored."""

from typing import Any, Literal

from pydantic import Field

from auraflux.serve.openai.schema import ApiModel, Tool

INT = 1 << 63


class CalledFunction(ApiModel):
    name: str
    arguments: str | dict[str, Any] | None = None


class Call(ApiModel):
    """A tool call in an earlier assistant message."""

    id: str | None = None
    function: CalledFunction


class Message(ApiModel):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None
    name: str | None = None


class Options(ApiModel):
    """Sampling settings; missing fields have the model's defaults. `num_predict` below 1 stands for no limit."""

    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    num_predict: int | None = Field(default=None, ge=-INT, lt=1 << 31)
    stop: str | list[str] | None = None
    seed: int | None = Field(default=None, ge=-INT, lt=INT)
    repeat_penalty: float | None = Field(default=None, gt=0, le=100)
    presence_penalty: float | None = Field(default=None, ge=-100, le=100)
    frequency_penalty: float | None = Field(default=None, ge=-100, le=100)


class AnswerFields(ApiModel):
    """Fields of chat and generate requests."""

    model: str = Field(min_length=1)
    options: Options | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    stream: bool | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)


class ChatRequest(AnswerFields):
    """A conversation to answer; without messages, a request to load the model."""

    messages: list[Message] | None = None
    tools: list[Tool] | None = None


class GenerateRequest(AnswerFields):
    """A prompt to answer, or with `raw` to continue; without one, a request to load the model."""

    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[Any] | None = None
    raw: bool | None = None


class EmbedRequest(ApiModel):
    """Inputs to embed; `truncate` cuts those that exceed the context, unless it is false."""

    model: str = Field(min_length=1)
    input: str | list[str]
    truncate: bool | None = None
    keep_alive: float | str | None = None
    dimensions: int | None = Field(default=None, ge=1, lt=1 << 31)


class PromptEmbedRequest(ApiModel):
    """A text to embed, in the older form."""

    model: str = Field(min_length=1)
    prompt: str
    keep_alive: float | str | None = None


class Embeddings(ApiModel):
    """Embeddings in the order of the inputs."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OneEmbedding(ApiModel):
    """The embedding of a text."""

    embedding: list[float]


class NameRequest(ApiModel):
    """The name of a model, in `model` or in the older `name`."""

    model: str | None = None
    name: str | None = None

    @property
    def given(self) -> str:
        """The name; empty if neither field has one."""
        return self.model or self.name or ""


class PullRequest(NameRequest):
    """The name of a model to download."""

    stream: bool | None = None


class Answer(ApiModel):
    """An answer, or the last line of its stream: durations in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class ChatAnswer(Answer):
    """An answer of /api/chat."""

    message: dict[str, Any]


class GenerateAnswer(Answer):
    """An answer of /api/generate."""

    response: str


class Version(ApiModel):
    """The version of Ollama's API."""

    version: str


class Details(ApiModel):
    """Facts about a model."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(ApiModel):
    """A model in /api/tags and /api/ps."""

    name: str
    model: str
    size: int
    digest: str
    details: Details


class Models(ApiModel):
    """The models."""

    models: list[ListedModel]


class ShownModel(ApiModel):
    """All facts about a model."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class Progress(ApiModel):
    """Progress of a download."""

    status: str


class OllamaError(ApiModel):
    """An error."""

    error: str
