"""Recorded outputs of each syntax parse to the same deltas however they are chunked."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auraflux.serve.chat.deltas import Content, ParsedDelta, Reasoning, ToolCallArguments, ToolCallBegin
from auraflux.serve.parse import Syntax, find_syntax
from auraflux.serve.parse.families.harmony import HARMONY

FILES = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(Path(__file__).with_name("outputs").glob("*.json"))}
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


def parse(stem: str, tail: str, chunks: list[str], tools: list[dict[str, Any]] | None = TOOLS) -> list[ParsedDelta]:
    """Return the deltas in order, adjacent ones merged."""
    numbers = itertools.count()
    parser = syntax_of(stem).parser(tail, tools, new_id=lambda: f"call_{next(numbers)}")
    deltas: list[ParsedDelta] = []
    for step in [*(step for chunk in chunks for step in parser.feed(chunk)), *parser.finish()]:
        last = deltas[-1] if deltas else None
        if isinstance(step, Content | Reasoning | ToolCallArguments):
            assert step.text
        if type(last) is type(step) and isinstance(last, Content | Reasoning):
            deltas[-1] = type(last)(last.text + step.text)
        elif isinstance(last, ToolCallArguments) and isinstance(step, ToolCallArguments) and last.index == step.index:
            deltas[-1] = ToolCallArguments(last.index, last.text + step.text)
        else:
            deltas.append(step)
    return deltas


def summary(deltas: list[ParsedDelta]) -> dict[str, Any]:
    calls = [
        {
            "name": begin.name,
            "arguments": json.loads(next(s.text for s in deltas if isinstance(s, ToolCallArguments) and s.index == n)),
        }
        for n, begin in enumerate(s for s in deltas if isinstance(s, ToolCallBegin))
    ]
    return {
        "reasoning": "".join(s.text for s in deltas if isinstance(s, Reasoning)),
        "content": "".join(s.text for s in deltas if isinstance(s, Content)),
        "calls": calls,
    }


@pytest.mark.parametrize(("stem", "case"), CASES, ids=IDS)
def test_recorded_outputs(stem: str, case: dict[str, Any]):
    deltas = parse(stem, case["prompt_tail"], [case["text"]])
    assert summary(deltas) == {key: case[key] for key in ("reasoning", "content", "calls")}
    assert [s.index for s in deltas if isinstance(s, ToolCallBegin)] == list(range(len(case["calls"])))


@pytest.mark.parametrize(("stem", "case"), CASES, ids=IDS)
def test_character_by_character(stem: str, case: dict[str, Any]):
    assert parse(stem, case["prompt_tail"], list(case["text"])) == parse(stem, case["prompt_tail"], [case["text"]])


def cut(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(cut_ % (len(text) + 1) for cut_ in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(CASES), st.lists(st.integers(0, 10_000), max_size=6), st.integers(0, 10_000))
def test_result_does_not_depend_on_chunking(chosen: tuple[str, dict[str, Any]], cuts: list[int], end: int):
    stem, case = chosen
    # also outputs truncated anywhere
    text = case["text"][: end % (len(case["text"]) + 1)] if end % 2 else case["text"]
    assert parse(stem, case["prompt_tail"], cut(text, cuts)) == parse(stem, case["prompt_tail"], [text])


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<function=now>",
    "<parameter=a>",
    "</parameter>",
    "</function>",
]
FRAGMENTS += [
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
FRAGMENTS += [
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
@given(
    st.sampled_from(sorted(FILES)), st.lists(st.sampled_from(FRAGMENTS), max_size=12), st.lists(st.integers(0, 500), max_size=5)
)
def test_malformed_output_does_not_depend_on_chunking(stem: str, parts: list[str], cuts: list[int]):
    text = "".join(parts)
    assert parse(stem, "", cut(text, cuts)) == parse(stem, "", [text])


@pytest.mark.parametrize("stem", [stem for stem in sorted(FILES) if stem != "harmony"])
def test_no_calls_without_tools(stem: str):
    for case in FILES[stem]["cases"]:
        deltas = parse(stem, "", [text := "Look: " + case["text"]], tools=None)
        assert deltas == [Content(text)]


def test_content_is_held_back_only_for_a_possible_marker():
    parser = syntax_of("hermes").parser("", TOOLS)
    assert parser.feed("Hello <to") == [Content("Hello")]
    assert parser.feed("ad> now") == [Content(" <toad> now")]
    assert parser.feed(", 5 ") == [Content(", 5")]
    assert parser.finish() == [Content(" ")]


def test_json_answer_streams_once_it_is_not_a_call():
    parser = syntax_of("plain").parser("", TOOLS)
    assert parser.feed('{"name": "now"') == []
    assert parser.feed(', "age"') == [Content('{"name": "now", "age"')]
    assert parser.feed(": 3}") == [Content(": 3}")]


def test_arguments_are_streamed():
    parser = syntax_of("hermes").parser("", TOOLS, new_id=lambda: "call_0")
    assert parser.feed('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zü') == [
        ToolCallBegin(0, "call_0", "get_weather"),
        ToolCallArguments(0, '{"city": "Zü'),
    ]
    assert parser.feed('rich"') == [ToolCallArguments(0, 'rich"')]
    assert parser.feed("}}\n</tool_call>") == [ToolCallArguments(0, "}")]
    assert parser.finish() == []


def test_tagged_strings_stream_as_json():
    parser = syntax_of("coder").parser("", TOOLS, new_id=lambda: "call_0")
    begun = parser.feed('<tool_call>\n<function=write_file>\n<parameter=content>\nprint("')
    assert begun == [ToolCallBegin(0, "call_0", "write_file"), ToolCallArguments(0, '{"content": "print(\\"')]
    assert parser.feed('hi")\n') == [ToolCallArguments(0, 'hi\\")')]
    assert parser.feed("</parameter>\n</function>") == [ToolCallArguments(0, '"}')]


def test_truncated_call_has_partial_arguments():
    deltas = parse("coder", "", ["<tool_call>\n<function=write_file>\n<parameter=content>\nhalf of i"])
    assert deltas == [ToolCallBegin(0, "call_0", "write_file"), ToolCallArguments(0, '{"content": "half of i')]


def test_text_after_invalid_arguments_is_content():
    deltas = parse("hermes", "", ['<tool_call>\n{"name": "now", "arguments": {"a": oops}}\n</tool_call> end'])
    assert [type(s) for s in deltas] == [ToolCallBegin, ToolCallArguments, Content]
    assert deltas[-1] == Content("}}\n</tool_call> end")


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
def test_find_syntax(model_type: str, template: str | None, name: str):
    assert find_syntax(model_type, template).name == name


def test_syntax_tokens():
    harmony, hermes = find_syntax("gpt_oss", None), find_syntax("qwen3_moe", None)
    assert harmony.non_stop_tokens == ("<|end|>",)
    assert {"<|channel|>", "<|message|>", "<|end|>", "<|start|>"} <= set(harmony.visible_tokens)
    assert {"<tool_call>", "</tool_call>", "<think>", "</think>"} <= set(hermes.visible_tokens)


def test_call_ids():
    usual, short = find_syntax("qwen3_moe", None).new_id(), find_syntax("mistral", None).new_id()
    assert usual.startswith("call_")
    assert len(usual) == len("call_") + 24
    assert len(short) == 9
    assert short.isalnum()


def test_replies_are_continued_in_their_channel():
    tail = "<|start|>assistant"
    opening = HARMONY.reply_opening(tail, "hm", "")
    parser = HARMONY.parser(tail + opening, resumed=True)
    parts = parser.feed(" yes<|end|><|start|>assistant<|channel|>final<|message|>Hi") + parser.finish()
    assert parts == [Reasoning(" yes"), Content("Hi")]
    for reasoning in ("hm", ""):
        opening = HARMONY.reply_opening(tail, reasoning, "Hi")
        parser = HARMONY.parser(tail + opening, resumed=True)
        assert parser.feed("  there") + parser.finish() == [Content("  there")]
