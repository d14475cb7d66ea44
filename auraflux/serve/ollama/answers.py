"""/api/chat and /api/generate."""

import json
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from auraflux.serve.auth import caller
from auraflux.serve.chat.output import ChatOutput
from auraflux.serve.keep_alive import parse_keep_alive
from auraflux.serve.ollama.lines import (
    NDJSON,
    AnswerLines,
    LineStream,
    Part,
    chat_fields,
    error_line,
    generate_fields,
    without_answer,
)
from auraflux.serve.ollama.requests import chat_request, check_generate, prompt_request, sampling_fields
from auraflux.serve.ollama.schema import ChatAnswer, ChatRequest, GenerateAnswer, GenerateRequest, OllamaError
from auraflux.serve.openai.chat_request import to_conversation, to_format, to_sampling
from auraflux.serve.openai.schema import SamplingFields
from auraflux.serve.operation import Operation
from auraflux.serve.service import Service
from auraflux.serve.services import Services
from auraflux.serve.transport.body import read_body
from auraflux.serve.transport.sse import run_until_disconnect


def routes(services: Services) -> list[Operation]:
    """Return the routes that generate."""

    async def chat(request: Request) -> Response:
        body = await read_body(request, ChatRequest, services.limits)
        if not body.messages:
            return await _load(services, request, body, chat_fields)
        service = await services.select(request, body.model, body.keep_alive)
        asked = chat_request(service, body)
        [output] = await service.chat(to_conversation(asked, service.limits, caller(request), service.prompts.default_sampling))
        return await _answer(service, request, body, output, chat_fields)

    async def generate(request: Request) -> Response:
        body = await read_body(request, GenerateRequest, services.limits)
        check_generate(body)
        if not (body.prompt or body.suffix or body.images):
            return await _load(services, request, body, generate_fields)
        service = await services.select(request, body.model, body.keep_alive)
        output = await _generate(service, body, caller(request))
        return await _answer(service, request, body, output, generate_fields)

    common: dict[str, Any] = {"streams": NDJSON, "error": OllamaError}
    return [
        Operation(
            "/api/chat", chat, summary="Answer a conversation (Ollama).", request=ChatRequest, response=ChatAnswer, **common
        ),
        Operation(
            "/api/generate",
            generate,
            summary="Answer a prompt (Ollama).",
            request=GenerateRequest,
            response=GenerateAnswer,
            **common,
        ),
    ]


async def _load(
    services: Services, request: Request, body: ChatRequest | GenerateRequest, fields: Callable[[Part], dict[str, Any]]
) -> Response:
    """Answer a request without a prompt: it loads the model, or with `keep_alive: 0` unloads it."""
    if parse_keep_alive(body.keep_alive) == 0:
        reason = "unload" if await services.unload(body.model) else "load"
        return JSONResponse(without_answer(body.model, fields, reason))
    await services.select(request, body.model, body.keep_alive)
    return JSONResponse(without_answer(body.model, fields, "load"))


async def _generate(service: Service, body: GenerateRequest, user: str) -> ChatOutput:
    """Start the answer to a prompt: as a user's message, or raw, also for a model without a chat template."""
    if not body.raw and not body.suffix and (body.system or service.prompts.tokenizer.templates):
        asked = prompt_request(service, body)
        [output] = await service.chat(to_conversation(asked, service.limits, user, service.prompts.default_sampling))
        return output
    fields = SamplingFields(**sampling_fields(body))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = to_sampling(fields, service.prompts.default_sampling, max_tokens=fields.max_tokens, logprobs=logprobs)
    format = to_format(fields.response_format, None)
    prompts, suffix = [body.prompt or ""], body.suffix or ""
    [output] = await service.complete(prompts, sampling, format=format, count=1, user=user, suffix=suffix)
    return output


async def _answer(
    service: Service,
    request: Request,
    body: ChatRequest | GenerateRequest,
    output: ChatOutput,
    fields: Callable[[Part], dict[str, Any]],
) -> Response:
    lines = AnswerLines(body.model, output, fields, service.link.tokenizer)
    # unlike OpenAI's, Ollama's clients stream unless they say otherwise
    if body.stream is not False:
        return LineStream(lines.stream(), [output], error_line, service.limits.idle_s)
    answer = await run_until_disconnect(request.receive, lines.full_response(), [output])
    # 499: the client has disconnected and reads nothing
    return Response(json.dumps(answer), 499 if answer is None else 200, media_type="application/json")
