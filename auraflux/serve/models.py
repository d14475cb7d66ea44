"""/v1/models, /tokenize and /detokenize: what is served, and its tokens; /v1/experts/deal: which ranks have its experts."""

import asyncio
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from auraflux.errors import InputError
from auraflux.serve.bodies import DealtExperts, ModelList, ServedModel, TokenList, TokenText
from auraflux.serve.body import read_body
from auraflux.serve.chat_ask import to_ask_tokens
from auraflux.serve.operation import Operation
from auraflux.serve.schema import DealRequest, DetokenizeRequest, TokenizeRequest
from auraflux.serve.service import Service


def routes(service: Service) -> list[Route]:
    """Give the routes that tell of the model."""

    async def list_models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_about(service)]})

    async def one_model(request: Request) -> Response:
        service.check_model(request.path_params["model"])
        return JSONResponse(_about(service))

    async def tokenize(request: Request) -> Response:
        asked = await read_body(request, TokenizeRequest, service.limits)
        service.check_model(asked.model)
        tokens = await _tokens(service, asked)
        return JSONResponse({"count": len(tokens), "max_model_len": service.facts.context, "tokens": tokens})

    async def detokenize(request: Request) -> Response:
        asked = await read_body(request, DetokenizeRequest, service.limits)
        service.check_model(asked.model)
        wrong = next((token for token in asked.tokens if token >= service.facts.vocab), None)
        if wrong is not None:
            raise InputError(f"{wrong} is none of the model's {service.facts.vocab} tokens.")
        return JSONResponse({"prompt": await asyncio.to_thread(service.tokenizer.decode, asked.tokens, True)})

    async def deal(request: Request) -> Response:
        asked = await read_body(request, DealRequest, service.limits)
        service.check_model(asked.model)
        return JSONResponse(asdict(await service.deal_experts()))

    about = "Deal experts out to ranks by how often each was chosen."
    return [
        Operation("/v1/models", list_models, about="List the one model that is served.", gives=ModelList, errors=(503,)),
        Operation("/v1/models/{model:path}", one_model, about="Tell of a model.", gives=ServedModel, errors=(404, 503)),
        Operation("/tokenize", tokenize, about="Make tokens of a text or a chat.", takes=TokenizeRequest, gives=TokenList),
        Operation("/detokenize", detokenize, about="Make text of tokens.", takes=DetokenizeRequest, gives=TokenText),
        Operation("/v1/experts/deal", deal, about=about, takes=DealRequest, gives=DealtExperts, errors=(503,)),
    ]


async def _tokens(service: Service, asked: TokenizeRequest) -> list[int]:
    if (asked.prompt is None) == (asked.messages is None):
        raise InputError("Give either a prompt or messages.")
    if asked.prompt is not None:
        return await asyncio.to_thread(service.tokenizer.encode, asked.prompt, asked.add_special_tokens)
    return await service.tokenize(to_ask_tokens(asked, service.limits), asked.add_generation_prompt)


def _about(service: Service) -> dict[str, Any]:
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
    }
