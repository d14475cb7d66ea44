"""/v1/embeddings: OpenAI's Embeddings API."""

import base64
import json
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from auraflux.errors import InputError
from auraflux.serve.auth import caller
from auraflux.serve.chat.output import ChatOutput
from auraflux.serve.limits import at_most
from auraflux.serve.openai.response_schema import EmbeddingList
from auraflux.serve.openai.schema import EmbeddingsRequest
from auraflux.serve.operation import Operation
from auraflux.serve.service import Service
from auraflux.serve.services import Services
from auraflux.serve.transport.body import read_body
from auraflux.serve.transport.sse import run_until_disconnect

Text = str | list[int]


def routes(services: Services) -> list[Operation]:
    """Return the embeddings route."""

    async def embed(request: Request) -> Response:
        body = await read_body(request, EmbeddingsRequest, services.limits)
        service = await services.select(request, body.model)
        inputs, prompt = inputs_of(body.input), prompt_of(service, body.prompt_name)
        at_most("input", len(inputs), service.limits.embeddings)
        work = service.embed(inputs, user=caller(request, body.user), prompt=prompt)
        outputs = await run_until_disconnect(request.receive, work)
        # 499: the client has disconnected and reads nothing
        answer = None if outputs is None else _answer(service, body, outputs)
        return Response(json.dumps(answer), 499 if answer is None else 200, media_type="application/json")

    summary = "Embed one or more inputs."
    return [Operation("/v1/embeddings", embed, summary=summary, request=EmbeddingsRequest, response=EmbeddingList)]


def inputs_of(given: Text | list[str] | list[list[int]]) -> list[Text]:
    """Return the inputs as a list, from any of the request's forms."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InputError("input is an empty list; give at least one input.")
    return [given] if isinstance(given[0], int) else list(given)


def prompt_of(service: Service, name: str | None) -> str:
    """Return the text of the model's prompt of this name; without a name, of its default one."""
    embedding = service.embedding
    chosen = embedding.default_prompt if name is None else name
    if chosen is None:
        return ""
    if chosen not in embedding.prompts:
        known = ", ".join(embedding.prompts) or "none"
        raise InputError(f"The model has no prompt {chosen[:80]!r}. Its prompts: {known}.")
    return embedding.prompts[chosen]


def vectors(service: Service, outputs: list[ChatOutput], dimensions: int | None) -> np.ndarray:
    """Return the embeddings [N, D] in float32, cut to `dimensions` and then normalized if the model's are."""
    found = np.stack([np.frombuffer(output.embedding, "<f4") for output in outputs])
    if dimensions is not None and dimensions > found.shape[1]:
        raise InputError(f"dimensions is {dimensions}, but the model's embeddings have {found.shape[1]}.")
    found = found[:, :dimensions]
    if not service.embedding.normalize:
        return found
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)


def _answer(service: Service, body: EmbeddingsRequest, outputs: list[ChatOutput]) -> dict[str, Any]:
    data = []
    for index, vector in enumerate(vectors(service, outputs, body.dimensions)):
        encoded = base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": encoded})
    tokens = sum(output.prompt_tokens for output in outputs)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": service.facts.name, "usage": usage}
