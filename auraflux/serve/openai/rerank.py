"""/v1/rerank: documents in the order of their relevance to a query, as in Jina's and Cohere's APIs."""

import asyncio
import json
from typing import Any
from uuid import uuid4

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from auraflux.engine.request import Request
from auraflux.errors import InputError
from auraflux.serve.auth import caller
from auraflux.serve.chat.output import ChatOutput
from auraflux.serve.limits import at_most
from auraflux.serve.openai.response_schema import Ranking
from auraflux.serve.openai.schema import RerankRequest
from auraflux.serve.operation import Operation
from auraflux.serve.service import Service
from auraflux.serve.services import Services
from auraflux.serve.transport.body import read_body
from auraflux.serve.transport.sse import run_until_disconnect

# Jina's path, that without a version, and Cohere's
PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")
# name of the template in a GGUF file
TEMPLATE = "rerank"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# of Qwen3-Reranker, whose files hold no template
QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    f"<Instruct>: {INSTRUCTION}\n<Query>: {{query}}\n<Document>: {{document}}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
# the model's answer to whether a document is relevant
LABELS = ("no", "yes")


def routes(services: Services) -> list[Operation]:
    """Return the rerank routes."""

    async def rerank(request: HttpRequest) -> Response:
        body = await read_body(request, RerankRequest, services.limits)
        at_most("documents", len(body.documents), services.limits.embeddings)
        if not body.documents:
            raise InputError("documents is an empty list; give at least one document.")
        service = await services.select(request, body.model)
        template, labels = _template(service), _labels(service)
        documents = [each if isinstance(each, str) else each.text for each in body.documents]
        user = caller(request, body.user)

        def build() -> list[Request]:
            prompts = (tuple(_prompt(service, template, body, text)) for text in documents)
            return [service.prompts.fitted(Request(tokens, user=user, pooling="last", labels=labels)) for tokens in prompts]

        outputs = await run_until_disconnect(request.receive, service.pool(await asyncio.to_thread(build)))
        # Cohere's second version returns no documents
        shown = not request.url.path.startswith("/v2") if body.return_documents is None else body.return_documents
        answer = None if outputs is None else _answer(service, body, documents if shown else None, outputs)
        # 499: the client has disconnected and reads nothing
        return Response(json.dumps(answer), 499 if answer is None else 200, media_type="application/json")

    summary = "Order documents by their relevance to a query."
    return [Operation(path, rerank, summary=summary, request=RerankRequest, response=Ranking) for path in PATHS]


def _template(service: Service) -> str:
    """Return the prompt of a reranker, with places for query and document; refuse other models."""
    facts, templates = service.prompts.facts, service.prompts.tokenizer.templates
    if TEMPLATE in templates:
        return templates[TEMPLATE]
    named = f"{facts.name} {facts.path or ''}".lower()
    if facts.model_type.startswith("qwen3") and "rerank" in named:
        return QWEN3
    raise InputError(
        f"The model {facts.name} is not a reranker: its files hold no prompt for one, and its name is not Qwen3-Reranker's."
    )


def _labels(service: Service) -> tuple[int, ...]:
    found = [service.prompts.tokenizer.token_id(label) for label in LABELS]
    if None in found:
        raise InputError(f"The model {service.prompts.facts.name} cannot rerank: its vocabulary has no tokens 'yes' and 'no'.")
    return tuple(number for number in found if number is not None)


def _prompt(service: Service, template: str, body: RerankRequest, document: str) -> list[int]:
    if body.max_tokens_per_doc is not None:
        tokens = service.prompts.tokenizer.encode(document, special=False)
        if len(tokens) > body.max_tokens_per_doc:
            document = service.prompts.tokenizer.decode(tokens[: body.max_tokens_per_doc], special=True)
    if body.instruction is not None:
        template = template.replace(INSTRUCTION, body.instruction, 1)
    before, _, rest = template.partition("{query}")
    between, _, after = rest.partition("{document}")
    return service.prompts.tokenizer.encode(f"{before}{body.query}{between}{document}{after}", special=False)


def _answer(service: Service, body: RerankRequest, documents: list[str] | None, outputs: list[ChatOutput]) -> dict[str, Any]:
    logits = np.stack([np.frombuffer(output.embedding, "<f4") for output in outputs]).astype(np.float64)
    # the softmax of two numbers is the sigmoid of their difference
    scores = 1 / (1 + np.exp(np.clip(logits[:, 0] - logits[:, 1], -700, 700)))
    order = sorted(range(len(outputs)), key=lambda index: (-scores[index], index))
    results: list[dict[str, Any]] = []
    for index in order[: body.top_n]:
        result: dict[str, Any] = {"index": index, "relevance_score": float(scores[index])}
        results.append(result if documents is None else {**result, "document": {"text": documents[index]}})
    tokens = sum(output.prompt_tokens for output in outputs)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    billed = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}, "tokens": {"input_tokens": tokens}}
    return {
        "id": f"rerank-{uuid4().hex}",
        "model": service.prompts.facts.name,
        "usage": usage,
        "meta": billed,
        "results": results,
    }
