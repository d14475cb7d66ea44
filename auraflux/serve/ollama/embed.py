"""/api/embed, and the older /api/embeddings."""

import json
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from auraflux.serve.auth import caller
from auraflux.serve.ollama.schema import Embeddings, EmbedRequest, OllamaError, OneEmbedding, PromptEmbedRequest
from auraflux.serve.openai.embeddings import inputs_of
from auraflux.serve.operation import Operation
from auraflux.serve.services import Services
from auraflux.serve.transport.body import read_body
from auraflux.serve.transport.sse import run_until_disconnect


def routes(services: Services) -> list[Operation]:
    """Return the routes that embed."""

    async def embed(request: Request) -> Response:
        body = await read_body(request, EmbedRequest, services.limits)
        return _response(await _embed(services, request, body))

    async def embed_prompt(request: Request) -> Response:
        body = await read_body(request, PromptEmbedRequest, services.limits)
        found = await _embed(services, request, EmbedRequest(model=body.model, input=body.prompt, keep_alive=body.keep_alive))
        return _response(None if found is None else {"embedding": found["embeddings"][0]})

    summary, older = "Embed one or more inputs (Ollama).", "Embed a text (Ollama, older)."
    return [
        Operation("/api/embed", embed, summary=summary, request=EmbedRequest, response=Embeddings, error=OllamaError),
        Operation(
            "/api/embeddings",
            embed_prompt,
            summary=older,
            request=PromptEmbedRequest,
            response=OneEmbedding,
            error=OllamaError,
        ),
    ]


async def _embed(services: Services, request: Request, body: EmbedRequest) -> dict[str, Any] | None:
    service = await services.select(request, body.model, body.keep_alive)
    started = time.perf_counter()
    work = service.embed(inputs_of(body.input), user=caller(request), truncate=body.truncate is not False)
    outputs = await run_until_disconnect(request.receive, work)
    if outputs is None:
        return None
    vectors = service.prompts.embedding.vectors([output.embedding for output in outputs], body.dimensions)
    return {
        "model": body.model,
        "embeddings": vectors.tolist(),
        "total_duration": round((time.perf_counter() - started) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": sum(output.prompt_tokens for output in outputs),
    }


def _response(answer: dict[str, Any] | None) -> Response:
    # 499: the client has disconnected and reads nothing
    return Response(json.dumps(answer), 499 if answer is None else 200, media_type="application/json")
