"""What users and clients may ask for, changed by chance: requests, settings, command lines, chat templates."""

import json
import random
from functools import cache
from typing import Any

from click.testing import CliRunner
from starlette.testclient import TestClient

import auraflux
from auraflux.cli import main
from auraflux.run.language import LanguageModel
from auraflux.run.template import render
from auraflux.serve.app import make_app
from auraflux.serve.service import Service
from tests.fuzz.harness import Target
from tests.fuzz.mutate import mutated, octets, odd
from tests.fuzz.mutate import text as mutated_text
from tests.run.tiny import tiny
from tests.serve.fake_link import TEMPLATE, FakeLink

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}}
SAMPLING: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["x"], "max_tokens": 3, "logit_bias": {"5": 1}}
CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
]
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {
        "model": "toy/model",
        "messages": CHAT,
        "tools": [TOOL],
        "tool_choice": "auto",
        "n": 2,
        **SAMPLING,
        "response_format": SCHEMA,
        "logprobs": True,
        "top_logprobs": 2,
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "/v1/completions": {"prompt": ["a", "b"], "echo": False, "logprobs": 1, **SAMPLING},
    "/v1/responses": {
        "input": [{"role": "user", "content": "hi"}],
        "instructions": "x",
        "max_output_tokens": 5,
        "temperature": 0.3,
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "reasoning": {"effort": "low"},
    },
    "/v1/messages": {
        "max_tokens": 9,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "system": "x",
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "stop_sequences": ["x"],
        "temperature": 0.4,
    },
    "/tokenize": {"prompt": "abc", "messages": CHAT[:1], "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}
OPTIONS: dict[str, list[Any]] = {
    "--kv": ["k8v4", "none", "k4v2", "k9v9", ""],
    "--context": [1, 64, 0, -1, 10**12, "x"],
    "--quantize": [4, 8, 99, -1],
    **{key: [0, 1, -1, 10**20] for key in ("--protect-first", "--protect-last", "--newest", "--top-k", "--seed")},
    **{
        key: [0, 0.5, -1, 1e300, "nan", "inf"]
        for key in ("--sparse-v", "--temperature", "--top-p", "--min-p", "--repetition-penalty")
    },
    **{key: [0, -1e300, "nan", 2] for key in ("--presence-penalty", "--frequency-penalty")},
    "--expert-memory": ["4GB", "-1", "9" * 40 + "GB", ""],
    "--expert-io": ["auto", "direct", "x"],
    "--device": ["cpu", "cpu:1", "tpu", ""],
    "--stop": ["", "a", "\0"],
    "--system": ["", "x", "\udc80"],
}
WORDS = [
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
def client() -> TestClient:
    return TestClient(make_app(Service(FakeLink())))


def request(rng: random.Random) -> None:
    """A request that is answered, or refused with the client's own fault."""
    path = rng.choice(sorted(BODIES))
    body = json.dumps(mutated(rng, BODIES[path], 4)).encode()
    answer = client().post(path, content=octets(rng, body, 2) if rng.random() < 0.1 else body)
    assert answer.status_code < 500, f"{path}: {answer.status_code} {answer.text[:300]}"
    if answer.status_code >= 400:
        message = answer.json()["error"]["message"]
        assert len(message) < 2000, message[:300]


@cache
def model() -> LanguageModel:
    made = auraflux.load(tiny(), device="cpu", context=64)
    # the kernels are compiled and loaded by no input
    list(made.tokens("The quick", max_tokens=4))
    return made


def asked(rng: random.Random) -> None:
    """A prompt and settings that are honoured, or refused before anything is written."""
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
                assert undisturbed() == first_answer(), "the model answers otherwise than before"


def undisturbed() -> list[int]:
    return list(model().tokens("The lazy dog", max_tokens=4, temperature=0))


@cache
def first_answer() -> list[int]:
    return undisturbed()


def words(rng: random.Random) -> None:
    """A command line that ends with 0, or with 1 or 2 and a sentence."""
    chosen = [word for name in rng.sample(sorted(OPTIONS), 3) for word in (name, str(rng.choice(OPTIONS[name])))]
    done = CliRunner().invoke(
        main, ["generate", str(tiny()), "-p", rng.choice(["a", "", "\udc80", "x" * 999]), "-n", "1", *chosen]
    )
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code in (0, 1, 2)
    assert done.exit_code == 0 or len(done.stderr) < 2000, done.stderr[:300]


def template(rng: random.Random) -> None:
    """A chat template of any sort, and messages of any sort."""
    source = "".join(rng.choice(WORDS) for _ in range(rng.randint(1, 9))) if rng.random() < 0.7 else mutated_text(rng, TEMPLATE)
    messages = mutated(rng, CHAT, 2) if rng.random() < 0.5 else CHAT
    render(source, messages if isinstance(messages, list) else [messages], tools=[TOOL], add_generation_prompt=True)


COMPILING_S = 120.0  # kernels are compiled when they are first used

TARGETS = [
    Target("request", request, 40),
    Target("asked", asked, 20, COMPILING_S),
    Target("words", words, 6, COMPILING_S, every=20),
    # a template has 10 seconds itself
    Target("template", template, 40, 20.0),
]
