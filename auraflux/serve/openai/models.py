"""/v1/models, /tokenize, /detokenize, and /v1/experts/placement: which ranks hold which experts."""

import asyncio
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from auraflux.errors import InputError
from auraflux.serve.listing import Listing
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
from auraflux.serve.services import Services
from auraflux.serve.transport.body import read_body


def routes(services: Services) -> list[Route]:
    """Return the routes about models."""

    async def list_models(request: Request) -> Response:
        found = [_model(each, services.created) for each in await services.listings()]
        adapters = [_adapter(each, name) for each in found for name in each["adapters"]]
        return JSONResponse({"object": "list", "data": [*found, *adapters]})

    async def one_model(request: Request) -> Response:
        name = request.path_params["model"]
        found = _model(await services.listing(name), services.created)
        adapter = next(
            (
                each
                for each in found["adapters"]
                if name in (each, *(f"{of}:{each}" for of in (found["id"], *found["aliases"])))
            ),
            None,
        )
        return JSONResponse(found if adapter is None else _adapter(found, adapter))

    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeRequest, services.limits)
        service = await services.select(request, body.model)
        tokens = await _tokens(service, body)
        return JSONResponse({"count": len(tokens), "max_model_len": service.prompts.facts.context, "tokens": tokens})

    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeRequest, services.limits)
        service = await services.select(request, body.model)
        wrong = next((token for token in body.tokens if token >= service.prompts.facts.vocab), None)
        if wrong is not None:
            raise InputError(f"Token id {wrong} is outside the model's vocabulary of {service.prompts.facts.vocab} tokens.")
        return JSONResponse({"prompt": await asyncio.to_thread(service.prompts.tokenizer.decode, body.tokens, True)})

    async def tokenizer_info(request: Request) -> Response:
        tokenizer = (await services.select(request, request.query_params.get("model"))).prompts.tokenizer
        return JSONResponse({**tokenizer.names, "chat_template": tokenizer.templates.get("default")})

    async def place_experts(request: Request) -> Response:
        body = await read_body(request, ExpertPlacementRequest, services.limits)
        service = await services.select(request, body.model)
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
        Operation("/v1/models", list_models, summary="List the models.", response=ModelList, statuses=(503,)),
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
        return await asyncio.to_thread(service.prompts.tokenizer.encode, body.prompt, body.add_special_tokens)
    return await service.tokenize(tokenize_request_to_conversation(body, service.limits), body.add_generation_prompt)


def _adapter(model: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the entry of an adapter, a model of its own to clients."""
    return {**model, "id": name, "parent": model["id"], "aliases": [f"{model['id']}:{name}"], "adapters": []}


def _model(model: Listing, created: int) -> dict[str, Any]:
    loaded, sampling = model.loaded, model.default_sampling
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "auraflux",
        "aliases": list(model.aliases),
        "adapters": list(model.adapters),
        "parent": None,
        "loaded": loaded is not None,
        "max_model_len": model.context,
        "vocab_size": None if loaded is None else loaded.vocab,
        "model_type": model.model_type,
        "input_modalities": ["text", *(["image"] if model.takes_images else [])],
        "kv": None if loaded is None else loaded.kv,
        "device": None if loaded is None else loaded.device,
        "default_sampling": None if sampling is None else asdict(sampling),
    }
