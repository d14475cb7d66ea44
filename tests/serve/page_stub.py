"""A stub server for the chat page: it answers from a script, in the format of the real server.

Run `uvicorn tests.serve.page_stub:app` to see the page without a model. What a question holds decides what comes:
"thought", "hostile", "maths", "broken", "slow", "wait", "cut", "limit", "full", or the text of `ANSWER`.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from auraflux.serve.page import routes

HOSTILE = (
    '<img src=x onerror="window.hurt=1"><script>window.hurt=1</script> [a](javascript:window.hurt=1) '
    "[b](https://example.com/?q=<script>) ![c](https://example.com/x.png)\n\n```html\n<script>window.hurt=1</script>\n```\n\n"
    "| <b>head</b> | x |\n|---|---|\n| <svg onload=window.hurt=1> | y |\n"
)

ANSWER = '''A cache keeps what attention needs of every token that was read, so that each new token costs **one step** instead \
of a pass over the whole text.

## What is stored

1. For every layer, the *keys* and *values* of all tokens so far.
2. Nothing else: queries are used once and dropped.
   - Windowed layers keep only the last `window` tokens.
   - Recurrent layers keep one state of fixed size.

| Setting | Bits per value | Cache for 32,768 tokens |
|:--------|---------------:|------------------------:|
| `bf16`  |             16 |                  4.3 GB |
| `k8v4`  |      6 on average |                  1.7 GB |

## In code

```python
def attend(query: Tensor, cache: Cache) -> Tensor:
    """Read the cache with one query."""
    scores = query @ cache.keys.T / sqrt(query.shape[-1])  # [heads, tokens]
    return softmax(scores, dim=-1) @ cache.values
```

> Memory grows with every token, which is why a compressed cache holds longer conversations.

See [the paper](https://arxiv.org/abs/1706.03762) for where it began.
'''

MATHS = r"""The roots of $ax^2 + bx + c = 0$ are

$$
x_{1,2} = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}
$$

so there are two real ones where \(b^2 > 4ac\). Attention takes a softmax of scaled products:
\[
\operatorname{attend}(Q, K, V) = \operatorname{softmax}\left(\frac{QK^\top}{\sqrt{d_k}}\right)V, \qquad
\mathbf{A} = \begin{pmatrix} a_{11} & \cdots & a_{1n} \\ \vdots & \ddots & \vdots \\ a_{m1} & \cdots & a_{mn} \end{pmatrix}
\]

A coffee for $3 and a cake for $5 stay money, and $\nosuch{x}$ stays as it is.
"""

THOUGHT = "The reader asks about caches. Start from what attention needs, then say what is kept and what it costs.\n"


def chunk(**fields: Any) -> str:
    return f"data: {json.dumps({'id': 'chatcmpl-1', 'object': 'chat.completion.chunk', 'usage': None, **fields})}\n\n"


def delta(**fields: Any) -> str:
    return chunk(choices=[{"index": 0, "delta": fields, "finish_reason": None}])


def fragments(text: str) -> list[str]:
    """Split a text like a tokenizer, so that markup arrives in fragments."""
    return [text[at : at + 3] for at in range(0, len(text), 3)]


def answer_to(question: str) -> str:
    if "hostile" in question:
        return HOSTILE
    return MATHS if "maths" in question else ANSWER * (12 if "long" in question else 1)


async def written(question: str, messages: list[dict[str, Any]], begun: str) -> AsyncIterator[str]:
    pace_s = 0.01 if "slow" in question else float(os.environ.get("PACE_S", 0))
    yield delta(role="assistant", content="")
    if "thought" in question and not begun:
        for fragment in fragments(THOUGHT):
            yield delta(reasoning=fragment, reasoning_content=fragment)
            await asyncio.sleep(pace_s)
    text = answer_to(question).removeprefix(begun)
    full = "full" in question
    limited = full or ("limit" in question and not begun)
    for at, fragment in enumerate(fragments(text[:150] if limited else text)):
        yield delta(content=fragment)
        await asyncio.sleep(pace_s)
        if at == 20 and "broken" in question:
            yield chunk(error={"message": "The engine stopped.", "type": "server_error"})
            return
        if at == 20 and "cut" in question:
            return
    yield chunk(choices=[{"index": 0, "delta": {}, "finish_reason": "length" if limited else "stop"}])
    cached = 812 if len(messages) > 1 else 0
    usage = {
        "prompt_tokens": 131_072 - 318 if full else 1024,
        "completion_tokens": 318,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    timings = {"queue_s": 0.0, "first_s": 0.312, "total_s": 7.9, "tokens_per_s": 41.9, "cached_tokens": cached}
    yield chunk(choices=[], usage=usage, timings={**timings, "cache_nbytes": 70_500_000, "plain_nbytes": 188_000_000})
    yield "data: [DONE]\n\n"


def refused(status: int, message: str, **headers: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status_code=status, headers=headers)


async def models(request: Request) -> Response:
    if (key := request.app.state.key) and request.headers.get("authorization") != f"Bearer {key}":
        return refused(401, "The API key is not the right one.")
    if request.app.state.loading > 0:
        request.app.state.loading -= 1
        return refused(503, "The model is loading.", **{"retry-after": "0.1"})
    model = {"id": "example-model", "object": "model", "owned_by": "auraflux", "max_model_len": 131_072, "kv": "k8v4"}
    model["input_modalities"] = request.app.state.modalities
    if request.app.state.defaults:
        model["default_sampling"] = request.app.state.defaults
    further = [{**model, "id": name} for name in request.app.state.further]
    return JSONResponse({"object": "list", "data": [model, *further]})


async def ready(request: Request) -> Response:
    if request.app.state.loading > 0:
        return refused(503, "The model is being loaded; try again soon.")
    return JSONResponse({"status": "ready"})


async def tokenize(request: Request) -> Response:
    """Count four characters as a token."""
    body = await request.json()
    text = body.get("prompt") or "".join(message["content"] for message in body["messages"])
    return JSONResponse({"count": len(text) // 4, "max_model_len": 131_072, "tokens": []})


async def chat(request: Request) -> Response:
    body = await request.json()
    request.app.state.received.append(body)
    if (key := request.app.state.key) and request.headers.get("authorization") != f"Bearer {key}":
        return refused(401, "The API key is not the right one.")
    begun = body["messages"][-1]["content"] if body.get("continue_final_message") else ""
    question = next(message["content"] for message in reversed(body["messages"]) if message["role"] == "user")
    if "wait" in question and request.app.state.loading > 0:
        request.app.state.loading -= 1
        return refused(503, "The model is loading.", **{"retry-after": "0.1"})
    if "refuse" in question:
        return refused(400, "The prompt has 200,000 tokens and the context holds 131,072.")
    if isinstance(question, list):
        question = " ".join(part.get("text", "") for part in question)
    return StreamingResponse(written(question, body["messages"], begun), media_type="text/event-stream")


def stub(key: str = "", loading: int = 0) -> Starlette:
    """Return a server that requires `key` and reports `loading` times that its model is not ready."""
    api = [
        Route("/ready", ready),
        Route("/v1/models", models),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
    ]
    made = Starlette(routes=[*routes(), *api])
    made.state.key, made.state.loading, made.state.received, made.state.defaults = key, loading, [], {}
    made.state.further, made.state.modalities = [], ["text"]
    return made


app = stub()
