"""Mutations of requests, sampling settings and chat templates."""

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from starlette.testclient import TestClient
from tokenizers import Tokenizer as Tokenizers

import auraflux
from auraflux.errors import InputError
from auraflux.loading.language_model import LanguageModel
from auraflux.serve.app import make_app
from auraflux.serve.batch.batches import Batches
from auraflux.serve.service import Service
from auraflux.tokenizer.chat_template import render
from auraflux.tokenizer.tokenizer import Tokenizer
from tests.engine.tiny import tiny
from tests.fuzz.harness import Target
from tests.fuzz.mutate import mutated, mutated_bytes, odd
from tests.fuzz.mutate import text as mutated_text
from tests.serve.fake_link import TEMPLATE, FakeLink
from tests.tokenizer.toy_tokenizers import byte_level

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}}
SAMPLING: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["x"], "max_tokens": 3, "logit_bias": {"5": 1}}
# fields shared by two OpenAI routes
SHARED: dict[str, Any] = {
    **SAMPLING,
    "model": "toy/model",
    "top_k": 5,
    "min_p": 0.1,
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), 0.5),
    "repetition_penalty": 1.1,
    "n": 2,
    "ignore_eos": False,
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": SCHEMA,
    "grammar": {"type": "regex", "value": "[a-z]+"},
    "user": "x",
}
CHAT = [
    {"role": "system", "content": "be kind", "name": "x"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "hm",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
]
# fields shared by two Anthropic routes
MESSAGES_BODY: dict[str, Any] = {
    "model": "toy/model",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "rain"}]},
    ],
    "system": "x",
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_format": {"type": "json_schema", "schema": {"type": "object"}},
    "output_config": {"effort": "low"},
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **SHARED,
        "messages": CHAT,
        "tools": [TOOL],
        "tool_choice": "auto",
        "max_completion_tokens": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "parallel_tool_calls": True,
        "reasoning_effort": "low",
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "max_thinking_tokens": 5,
        "continue_final_message": False,
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "/v1/completions": {
        **SHARED,
        "prompt": ["a", "b"],
        "echo": False,
        "logprobs": 1,
        "prompt_logprobs": 1,
        "suffix": "x",
        "best_of": 1,
    },
    "/v1/responses": {
        "model": "toy/model",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "rain"},
        ],
        "instructions": "x",
        "max_output_tokens": 5,
        "temperature": 0.3,
        "top_p": 0.9,
        "top_logprobs": 2,
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["message.output_text.logprobs"],
        "metadata": {"a": "b"},
        **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), "x"),
        "stream": True,
        "store": False,
        "truncation": "auto",
        "background": False,
        "previous_response_id": None,
        "conversation": None,
        "prompt": None,
    },
    "/v1/messages": {
        **MESSAGES_BODY,
        "max_tokens": 9,
        "stop_sequences": ["x"],
        "temperature": 0.4,
        "top_p": 0.9,
        "top_k": 5,
        "stream": True,
        "metadata": {"user_id": "x"},
    },
    "/v1/messages/count_tokens": MESSAGES_BODY,
    "/tokenize": {
        "model": "toy/model",
        "prompt": "abc",
        "messages": CHAT[:1],
        "tools": [TOOL],
        **dict.fromkeys(("add_special_tokens", "add_generation_prompt"), True),
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "/detokenize": {"model": "toy/model", "tokens": [1, 2, 3]},
    "/v1/experts/placement": {"model": "toy/model"},
}
OPTIONS = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "num_predict": 3,
    "stop": ["x"],
    "seed": 1,
    "repeat_penalty": 1.1,
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), 0.5),
    "num_ctx": 512,
}
OLLAMA = {"model": "toy/model", "options": OPTIONS, "format": {"type": "object"}, "think": True, "keep_alive": "5m"}
BODIES |= {
    "/api/chat": {
        **OLLAMA,
        "messages": [
            {"role": "user", "content": "hi", "images": []},
            {"role": "assistant", "thinking": "hm", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "tool", "tool_name": "f", "content": "rain"},
        ],
        "tools": [TOOL],
        "stream": False,
        "logprobs": True,
        "top_logprobs": 2,
    },
    "/api/generate": {
        **OLLAMA,
        **dict.fromkeys(("prompt", "system"), "x"),
        **dict.fromkeys(("template", "context", "images")),
        "suffix": "x",
        "logprobs": True,
        "top_logprobs": 2,
        **dict.fromkeys(("raw", "stream"), True),
    },
    "/v1/embeddings": {
        "model": "toy/model",
        "input": ["a", "b"],
        "encoding_format": "base64",
        "dimensions": 3,
        "prompt_name": "query",
        "user": "x",
    },
    "/api/embed": {"model": "toy/model", "input": ["a", "b"], "truncate": True, "dimensions": 3, "keep_alive": 1},
    "/api/embeddings": {"model": "toy/model", "prompt": "a", "keep_alive": "5m"},
    **{
        path: {
            "model": "toy/model",
            "query": "a",
            "documents": ["b", {"text": "c"}],
            "top_n": 1,
            "return_documents": True,
            "max_tokens_per_doc": 5,
            "instruction": "x",
            "user": "x",
        }
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    },
    "/v1/batches": {
        "input_file_id": "file_0123456789abcdef0123456789abcdef",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "metadata": {"a": "b"},
    },
    **{path: {"model": "toy/model", "name": "toy/model", "stream": False} for path in ("/api/show", "/api/pull")},
}
NEEDED = {"messages", "prompt", "input", "tokens", "model", "max_tokens", "query", "documents", "input_file_id", "endpoint"}
HEADERS = {
    "host": ["", "a b", "x" * 9000, "testserver:99999"],
    "content-type": ["text/plain", "application/json; charset=x", ""],
    "content-length": ["0", "-1", "9" * 30, "x"],
    "authorization": ["Bearer", "Bearer \x7f", "Basic eA=="],
}
FRAGMENTS = [
    *(
        "{% for i in range(9) %}",
        "{% endfor %}",
        "{% if messages %}",
        "{% else %}",
        "{% endif %}",
        "{% set x = [1] %}",
        "{{ x }}",
    ),
    *(
        "{{ messages[0].content }}",
        "{{ messages | tojson }}",
        "{{ 'a' * 99 }}",
        "{{ x.__class__ }}",
        "{% macro m(a) %}",
        "{{ m(1) }}",
    ),
    *(
        "{% endmacro %}",
        "{{ [x, x] | sort }}",
        "{{ namespace(a=x).a }}",
        "{{ raise_exception('no') }}",
        "{%",
        "}}",
        "{{ 10 ** 900 }}",
    ),
    *("{% generation %}", "{% endgeneration %}", "{% include 'x' %}", "{{ 1 // 0 }}", "{{ range(10**9) }}", "{{ '%d' % 'a' }}"),
]


@cache
def client(embeds: bool = False) -> TestClient:
    """Return a client of a server with files, of an embedding model or of one that reranks and fills in the middle."""
    link = FakeLink(embeds=embeds)
    inner = Tokenizers.from_str(byte_level().to_str())
    inner.add_tokens(["yes", "no", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    templates = {"default": TEMPLATE, "rerank": "{query}\n{document}"}
    link.tokenizer = Tokenizer(inner, names={"eos_token": "<|im_end|>"}, ends=[2], templates=templates)
    link.facts = replace(link.facts, vocab=link.tokenizer.vocab_size)
    return TestClient(make_app(Service(link), None, Batches(Path(mkdtemp(prefix="auraflux-fuzz-")))))


def request(rng: random.Random) -> None:
    """Send a request, which must be answered or refused with a 4xx status."""
    path = rng.choice(sorted(BODIES))
    needed = NEEDED if path != "/tokenize" else {rng.choice(["prompt", "messages"])}
    original = {key: value for key, value in BODIES[path].items() if key in needed or rng.random() < 0.3}
    body = json.dumps(mutated(rng, original, 3) if rng.random() < 0.9 else original).encode()
    headers = {name: rng.choice(HEADERS[name]) for name in rng.sample(sorted(HEADERS), 1)} if rng.random() < 0.05 else {}
    answer = client("/embed" in path).post(
        path, content=mutated_bytes(rng, body, 2) if rng.random() < 0.1 else body, headers=headers
    )
    assert answer.status_code < 500, f"{path}: {answer.status_code} {answer.text[:300]}"
    if answer.status_code >= 400:
        error = answer.json()["error"]
        message = error if path.startswith("/api/") else error["message"]
        assert len(message) < 2000, message[:300]
        raise InputError(message)


@cache
def model() -> LanguageModel:
    made = auraflux.load(tiny(), device="cpu", context=64, sampling={"temperature": 0})
    # compile and load the kernels before any input
    list(made.tokens("The quick", max_tokens=4))
    return made


def generate(rng: random.Random) -> None:
    """Generate from a prompt and settings, which must be accepted or refused before the first token."""
    settings = {**SAMPLING, "logit_bias": {5: 1.0}, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.5, "logprobs": 2}
    chosen = {name: settings[name] for name in rng.sample(sorted(settings), 4)}
    prompt = rng.choice(["The quick", [5, 6, 7], odd(rng)])
    given = mutated(rng, chosen, 2)
    if isinstance(given, dict) and all(isinstance(name, str) for name in given):
        given["max_tokens"] = given["max_tokens"] if isinstance(given.get("max_tokens"), str | list | float) else 2
        try:
            list(model().tokens(prompt, **given))
        finally:
            if rng.random() < 0.1:
                assert output_after() == expected_output(), "the model gives a different output than before"


def output_after() -> list[int]:
    return list(model().tokens("The lazy dog", max_tokens=4, temperature=0))


@cache
def expected_output() -> list[int]:
    return output_after()


def template(rng: random.Random) -> None:
    """Render a random chat template with random messages."""
    source = (
        "".join(rng.choice(FRAGMENTS) for _ in range(rng.randint(1, 9))) if rng.random() < 0.7 else mutated_text(rng, TEMPLATE)
    )
    messages = mutated(rng, CHAT, 2) if rng.random() < 0.5 else CHAT
    render(source, messages if isinstance(messages, list) else [messages], tools=[TOOL], add_generation_prompt=True)


COMPILING_S = 120.0  # kernels are compiled when they are first used

TARGETS = [
    Target("request", request, 40),
    Target("generate", generate, 20, COMPILING_S),
    # templates have their own limit of 10 seconds
    Target("template", template, 40, 20.0),
]
