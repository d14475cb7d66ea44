"""/v1/embeddings: OpenAI's Embeddings API."""

import base64
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from auraflux.errors import InputError
from auraflux.serve.auth import caller
from auraflux.serve.chat.output import ChatOutput
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
        work = service.embed(inputs_of(body.input), user=caller(request, body.user), prompt_name=body.prompt_name)
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


def _answer(service: Service, body: EmbeddingsRequest, outputs: list[ChatOutput]) -> dict[str, Any]:
    data = []
    vectors = service.prompts.embedding.vectors([output.embedding for output in outputs], body.dimensions)
    for index, vector in enumerate(vectors):
        encoded = base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": encoded})
    tokens = sum(output.prompt_tokens for output in outputs)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": service.prompts.facts.name, "usage": usage}
