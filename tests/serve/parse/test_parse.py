"""Texts as models write them, recorded by syntax, are taken apart the same however they are cut."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auraflux.serve.deltas import CallArguments, CallBegin, Content, Reasoning, Said
from auraflux.serve.parse import Syntax, find_syntax

FILES = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(Path(__file__).with_name("texts").glob("*.json"))}
CASES = [(stem, case) for stem, file in FILES.items() for case in file["cases"]]
IDS = [f"{stem}: {case['about']}" for stem, case in CASES]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in {
        "get_weather": {"city": {"type": "string"}, "days": {"type": "integer"}, "all": {"type": "array"}},
        "write_file": {"path": {"type": "string"}, "content": {"type": "string"}},
        "now": {},
    }.items()
]


def syntax_of(stem: str) -> Syntax:
    return find_syntax(FILES[stem]["model_type"], FILES[stem]["template"])


def parse(stem: str, tail: str, pieces: list[str], tools: list[dict[str, Any]] | None = TOOLS) -> list[Said]:
    """What is said, in order, with texts that belong together joined."""
    numbers = itertools.count()
    parser = syntax_of(stem).parser(tail, tools, new_id=lambda: f"call_{next(numbers)}")
    said: list[Said] = []
    for step in [*(step for piece in pieces for step in parser.feed(piece)), *parser.finish()]:
        last = said[-1] if said else None
        if isinstance(step, Content | Reasoning | CallArguments):
            assert step.text
        if type(last) is type(step) and isinstance(last, Content | Reasoning):
            said[-1] = type(last)(last.text + step.text)
        elif isinstance(last, CallArguments) and isinstance(step, CallArguments) and last.index == step.index:
            said[-1] = CallArguments(last.index, last.text + step.text)
        else:
            said.append(step)
    return said


def summary(said: list[Said]) -> dict[str, Any]:
    calls = [
        {
            "name": begin.name,
            "arguments": json.loads(next(s.text for s in said if isinstance(s, CallArguments) and s.index == n)),
        }
        for n, begin in enumerate(s for s in said if isinstance(s, CallBegin))
    ]
    return {
        "reasoning": "".join(s.text for s in said if isinstance(s, Reasoning)),
        "content": "".join(s.text for s in said if isinstance(s, Content)),
        "calls": calls,
    }


@pytest.mark.parametrize(("stem", "case"), CASES, ids=IDS)
def test_recorded_texts(stem: str, case: dict[str, Any]):
    said = parse(stem, case["prompt_tail"], [case["text"]])
    assert summary(said) == {key: case[key] for key in ("reasoning", "content", "calls")}
    assert [s.index for s in said if isinstance(s, CallBegin)] == list(range(len(case["calls"])))


@pytest.mark.parametrize(("stem", "case"), CASES, ids=IDS)
def test_character_by_character(stem: str, case: dict[str, Any]):
    assert parse(stem, case["prompt_tail"], list(case["text"])) == parse(stem, case["prompt_tail"], [case["text"]])


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(CASES), st.lists(st.integers(0, 10_000), max_size=6), st.integers(0, 10_000))
def test_every_cutting_says_the_same(chosen: tuple[str, dict[str, Any]], places: list[int], end: int):
    stem, case = chosen
    # also texts that stop anywhere
    text = case["text"][: end % (len(case["text"]) + 1)] if end % 2 else case["text"]
    assert parse(stem, case["prompt_tail"], cut(text, places)) == parse(stem, case["prompt_tail"], [text])


MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<function=now>", "<parameter=a>", "</parameter>", "</function>"]
MARKS += [
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "```tool_code\n",
    "```",
]
MARKS += [
    '{"name": "now", "arguments": ',
    "{}",
    "}",
    "[",
    "]",
    '"',
    "\\",
    "now",
    "(",
    ")",
    "\n",
    " ",
    "x",
    "<",
    "to=functions.now",
]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(FILES)), st.lists(st.sampled_from(MARKS), max_size=12), st.lists(st.integers(0, 500), max_size=5))
def test_nonsense_says_the_same_in_every_cutting(stem: str, parts: list[str], places: list[int]):
    text = "".join(parts)
    assert parse(stem, "", cut(text, places)) == parse(stem, "", [text])


@pytest.mark.parametrize("stem", [stem for stem in sorted(FILES) if stem != "harmony"])
def test_without_tools_nothing_is_a_call(stem: str):
    for case in FILES[stem]["cases"]:
        said = parse(stem, "", [text := "Look: " + case["text"]], tools=None)
        assert said == [Content(text)]


def test_content_is_held_back_no_longer_than_it_may_be_a_marker():
    parser = syntax_of("hermes").parser("", TOOLS)
    assert parser.feed("Hello <to") == [Content("Hello")]
    assert parser.feed("ad> now") == [Content(" <toad> now")]
    assert parser.feed(", 5 ") == [Content(", 5")]
    assert parser.finish() == [Content(" ")]


def test_an_answer_in_json_streams_as_soon_as_it_is_no_call():
    parser = syntax_of("plain").parser("", TOOLS)
    assert parser.feed('{"name": "now"') == []
    assert parser.feed(', "age"') == [Content('{"name": "now", "age"')]
    assert parser.feed(": 3}") == [Content(": 3}")]


def test_arguments_stream_as_they_come():
    parser = syntax_of("hermes").parser("", TOOLS, new_id=lambda: "call_0")
    assert parser.feed('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zü') == [
        CallBegin(0, "call_0", "get_weather"),
        CallArguments(0, '{"city": "Zü'),
    ]
    assert parser.feed('rich"') == [CallArguments(0, 'rich"')]
    assert parser.feed("}}\n</tool_call>") == [CallArguments(0, "}")]
    assert parser.finish() == []


def test_strings_between_tags_stream_as_json():
    parser = syntax_of("coder").parser("", TOOLS, new_id=lambda: "call_0")
    begun = parser.feed('<tool_call>\n<function=write_file>\n<parameter=content>\nprint("')
    assert begun == [CallBegin(0, "call_0", "write_file"), CallArguments(0, '{"content": "print(\\"')]
    assert parser.feed('hi")\n') == [CallArguments(0, 'hi\\")')]
    assert parser.feed("</parameter>\n</function>") == [CallArguments(0, '"}')]


def test_a_call_that_is_cut_off_leaves_its_arguments_open():
    said = parse("coder", "", ["<tool_call>\n<function=write_file>\n<parameter=content>\nhalf of i"])
    assert said == [CallBegin(0, "call_0", "write_file"), CallArguments(0, '{"content": "half of i')]


def test_what_follows_broken_arguments_is_content():
    said = parse("hermes", "", ['<tool_call>\n{"name": "now", "arguments": {"a": oops}}\n</tool_call> end'])
    assert [type(s) for s in said] == [CallBegin, CallArguments, Content]
    assert said[-1] == Content("}}\n</tool_call> end")


@pytest.mark.parametrize(
    ("model_type", "template", "name"),
    [
        ("qwen3_moe", None, "hermes"),
        ("qwen3_5_moe", None, "coder"),
        ("qwen3_5_moe", "<tool_call>\n{", "hermes"),
        ("llama", "<|im_start|> <tool_call>", "hermes"),
        ("llama", "<|im_start|>", "llama"),
        ("llama", "[INST] [TOOL_CALLS]", "mistral"),
        ("gpt_oss", None, "harmony"),
        ("deepseek_v3", None, "deepseek"),
        ("gemma3_text", None, "gemma"),
        ("glm4_moe", None, "glm"),
        ("glm4_moe_lite", "<tool_call> <arg_key>", "glm"),
        ("minimax_m2", None, "minimax"),
        ("kimi_k25", None, "kimi"),
        ("deepseek_v3", "<|tool_calls_section_begin|>", "kimi"),
        ("unheard_of", None, "plain"),
    ],
)
def test_syntaxes_are_found(model_type: str, template: str | None, name: str):
    assert find_syntax(model_type, template).name == name


def test_what_a_syntax_says_of_its_tokens():
    harmony, hermes = find_syntax("gpt_oss", None), find_syntax("qwen3_moe", None)
    assert harmony.goes_on == ("<|end|>",)
    assert {"<|channel|>", "<|message|>", "<|end|>", "<|start|>"} <= set(harmony.shows)
    assert {"<tool_call>", "</tool_call>", "<think>", "</think>"} <= set(hermes.shows)


def test_ids_of_calls():
    usual, short = find_syntax("qwen3_moe", None).new_id(), find_syntax("mistral", None).new_id()
    assert usual.startswith("call_")
    assert len(usual) == len("call_") + 24
    assert len(short) == 9
    assert short.isalnum()
