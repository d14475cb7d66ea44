"""Response schemas of OpenAI's APIs, for the OpenAPI document only: responses are encoded by hand, which is faster."""

from typing import Any, Literal

from pydantic import BaseModel, Field


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """An error."""

    error: ErrorDetail


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class Timings(BaseModel):
    """Latencies in seconds, KV cache bytes (plain_nbytes: uncompressed), decode steps and draft tokens.

    drafted   draft tokens verified
    accepted  draft tokens accepted
    """

    queue_s: float
    first_s: float
    total_s: float
    tokens_per_s: float | None
    cache_nbytes: int
    plain_nbytes: int
    cached_tokens: int
    steps: int
    drafted: int
    accepted: int


class CalledFunction(BaseModel):
    name: str
    arguments: str


class Call(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    timings: Timings


class DefaultSampling(BaseModel):
    """Sampling settings of requests that leave them out; null is off. `source` says where they come from."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    source: str


class ServedModel(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    aliases: list[str]
    adapters: list[str]
    parent: str | None = Field(description="Of an adapter: the model that it changes.")
    loaded: bool
    max_model_len: int | None = Field(description="Most tokens of prompt and answer together; null if not known yet.")
    vocab_size: int | None
    model_type: str
    input_modalities: list[str] = Field(description="text, and image where messages may have images.")
    kv: str | None = Field(description="Format of the KV cache; this and what follows is null before the model is loaded.")
    device: str | None
    default_sampling: DefaultSampling | None


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ServedModel]


class TokenList(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]


class EmbeddingItem(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    """Embeddings in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: dict[str, int]


class TokenizerInfo(BaseModel):
    """Special tokens by name, and the chat template."""

    eos_token: str | None = None
    bos_token: str | None = None
    chat_template: str | None


class TokenText(BaseModel):
    prompt: str


class ExpertPlacementResponse(BaseModel):
    """Result of redistributing experts.

    rows    counted: expert uses by tokens, over all layers
    before  share of a layer's rows on its busiest rank, averaged over layers
    after   the same share under the new placement
    moved   experts that changed rank
    """

    rows: int
    before: float
    after: float
    moved: int


class State(BaseModel):
    status: str


class RankedResult(BaseModel):
    """A document with its relevance from 0 to 1."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class Ranking(BaseModel):
    """Documents, the most relevant first."""

    id: str
    model: str
    usage: dict[str, int]
    meta: dict[str, Any]
    results: list[RankedResult]
