"""/v1/models, /tokenize, /detokenize, and /v1/experts/placement: which ranks hold which experts."""

import asyncio
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from auraflux.errors import InputError
from auraflux.serve.openai.chat_request import tokenize_request_to_conversation
from auraflux.serve.openai.response_schema import (
    ExpertPlacementResponse,
    ModelList,
    ServedModel,
    TokenizerInfo,
    TokenList,
    TokenText,
)
from auraflux.serve.openai.schema import DetokenizeRequest, ExpertPlacementRequest, TokenizeRequest
from auraflux.serve.operation import Operation
from auraflux.serve.service import Service
from auraflux.serve.transport.body import read_body


def routes(service: Service) -> list[Route]:
    """Return the routes about the model."""

    async def list_models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(service)]})

    async def one_model(request: Request) -> Response:
        service.check_model(request.path_params["model"])
        return JSONResponse(_model(service))

    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeRequest, service.limits)
        service.check_model(body.model)
        tokens = await _tokens(service, body)
        return JSONResponse({"count": len(tokens), "max_model_len": service.facts.context, "tokens": tokens})

    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeRequest, service.limits)
        service.check_model(body.model)
        wrong = next((token for token in body.tokens if token >= service.facts.vocab), None)
        if wrong is not None:
            raise InputError(f"Token id {wrong} is outside the model's vocabulary of {service.facts.vocab} tokens.")
        return JSONResponse({"prompt": await asyncio.to_thread(service.tokenizer.decode, body.tokens, True)})

    async def tokenizer_info(request: Request) -> Response:
        tokenizer = service.tokenizer
        return JSONResponse({**tokenizer.names, "chat_template": tokenizer.templates.get("default")})

    async def place_experts(request: Request) -> Response:
        body = await read_body(request, ExpertPlacementRequest, service.limits)
        service.check_model(body.model)
        return JSONResponse(asdict(await service.place_experts()))

    place = Operation(
        "/v1/experts/placement",
        place_experts,
        summary="Redistribute experts over ranks by how often each was used.",
        request=ExpertPlacementRequest,
        response=ExpertPlacementResponse,
        statuses=(503,),
    )
    return [
        Operation("/v1/models", list_models, summary="List the served model.", response=ModelList, statuses=(503,)),
        Operation("/v1/models/{model:path}", one_model, summary="Describe a model.", response=ServedModel, statuses=(404, 503)),
        Operation(
            "/tokenize", tokenize, summary="Tokenize a text or a conversation.", request=TokenizeRequest, response=TokenList
        ),
        Operation(
            "/tokenizer_info",
            tokenizer_info,
            summary="Return the special tokens and the chat template.",
            response=TokenizerInfo,
            statuses=(400, 503),
        ),
        Operation("/detokenize", detokenize, summary="Decode tokens.", request=DetokenizeRequest, response=TokenText),
        place,
        # the path of releases before /v1/experts/placement
        Route("/v1/experts/deal", place_experts, methods=["POST"]),
    ]


async def _tokens(service: Service, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InputError("Give either a prompt or messages.")
    if body.prompt is not None:
        return await asyncio.to_thread(service.tokenizer.encode, body.prompt, body.add_special_tokens)
    return await service.tokenize(tokenize_request_to_conversation(body, service.limits), body.add_generation_prompt)


def _model(service: Service) -> dict[str, Any]:
    facts = service.facts
    return {
        "id": facts.name,
        "object": "model",
        "created": service.created,
        "owned_by": "auraflux",
        "max_model_len": facts.context,
        "vocab_size": facts.vocab,
        "model_type": facts.model_type,
        "kv": facts.kv,
        "device": facts.device,
        "default_sampling": asdict(facts.default_sampling),
    }
