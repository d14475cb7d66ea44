"""/api/chat and /api/generate."""

import json
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from auraflux.serve.auth import caller
from auraflux.serve.chat.output import ChatOutput
from auraflux.serve.ollama.lines import (
    NDJSON,
    AnswerLines,
    LineStream,
    Part,
    chat_fields,
    error_line,
    generate_fields,
    loaded,
)
from auraflux.serve.ollama.requests import chat_request, check_generate, prompt_request, sampling_fields
from auraflux.serve.ollama.schema import ChatAnswer, ChatRequest, GenerateAnswer, GenerateRequest, OllamaError
from auraflux.serve.openai.chat_request import to_conversation, to_format, to_sampling
from auraflux.serve.openai.schema import SamplingFields
from auraflux.serve.operation import Operation
from auraflux.serve.service import Service
from auraflux.serve.transport.body import read_body
from auraflux.serve.transport.sse import run_until_disconnect


def routes(service: Service) -> list[Operation]:
    """Return the routes that generate."""

    async def chat(request: Request) -> Response:
        body = await read_body(request, ChatRequest, service.limits)
        service.check_ready()
        service.check_model(body.model)
        if not body.messages:
            return JSONResponse(loaded(body.model, chat_fields))
        asked = chat_request(service, body)
        [output] = await service.chat(to_conversation(asked, service.limits, caller(request), service.default_sampling))
        return await _answer(service, request, body, output, chat_fields)

    async def generate(request: Request) -> Response:
        body = await read_body(request, GenerateRequest, service.limits)
        service.check_ready()
        service.check_model(body.model)
        check_generate(body)
        if not body.prompt:
            return JSONResponse(loaded(body.model, generate_fields))
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


async def _generate(service: Service, body: GenerateRequest, user: str) -> ChatOutput:
    """Start the answer to a prompt: as a user's message, or raw, also for a model without a chat template."""
    if not body.raw and (body.system or service.tokenizer.templates):
        asked = prompt_request(service, body)
        [output] = await service.chat(to_conversation(asked, service.limits, user, service.default_sampling))
        return output
    fields = SamplingFields(**sampling_fields(body))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = to_sampling(fields, service.default_sampling, max_tokens=fields.max_tokens, logprobs=logprobs)
    format = to_format(fields.response_format, None)
    [output] = await service.complete([body.prompt or ""], sampling, format=format, count=1, user=user)
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
