"""Schemas of OpenAI's Files and Batch APIs."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from auraflux.serve.batch.lines import ENDPOINTS
from auraflux.serve.openai.schema import ApiModel


class BatchRequest(ApiModel):
    """A file of requests to run. Batches run as soon as earlier ones have ended, whatever the window."""

    input_file_id: str
    endpoint: Literal[ENDPOINTS]  # type: ignore[valid-type]
    completion_window: str = Field(default="24h", max_length=16)
    metadata: dict[str, str] | None = Field(default=None, max_length=16)


class StoredFile(BaseModel):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str


class FileList(BaseModel):
    object: Literal["list"]
    data: list[StoredFile]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"]
    deleted: bool


class BatchState(BaseModel):
    """A batch; times are in seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    request_counts: dict[str, int]
    errors: dict[str, Any] | None
    metadata: dict[str, str]


class BatchList(BaseModel):
    object: Literal["list"]
    data: list[BatchState]
    first_id: str | None
    last_id: str | None
    has_more: bool
