"""Grammars of formats: their output validates, unenforceable schemas are refused, calls round-trip through the parser."""

import contextlib
import json
import random
from typing import Any

import jsonschema
import pytest
import tokenizers

from auraflux.errors import InputError
from auraflux.serve.chat.conversation import Conversation, Format, NamedTool
from auraflux.serve.chat.deltas import Content, Reasoning, ToolCallArguments, ToolCallBegin
from auraflux.serve.chat.json_schema import prepare_schema
from auraflux.serve.chat.structured_output import grammar_for, grammar_of
from auraflux.serve.parse import Syntax, find_syntax
from auraflux.tokenizer.tokenizer import Tokenizer
from tests.serve.schemas import Walker, random_schema
from tests.tokenizer.toy_tokenizers import byte_level

STOP_TOKENS = (0, 2)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
SYNTAXES = {
    "hermes": ("qwen3_moe", "<tool_call> <think>"),
    "coder": ("qwen3_5_moe", "<tool_call>\n<function= <think>"),
    "llama": ("llama", "<|python_tag|>"),
    "deepseek": ("deepseek_v3", None),
    "deepseek-v3.1": ("deepseek_v3", "<\uff5ctool\u2581calls\u2581begin\uff5c> </think>"),
    "harmony": ("gpt_oss", None),
    "gemma": ("gemma3_text", "<start_of_turn>"),
    "glm": ("glm4_moe", None),
    "minimax": ("minimax_m2", None),
    "kimi": ("kimi_k2", None),
    "mistral": ("mistral", "[TOOL_CALLS]"),
    "mistral-args": ("mistral", "[TOOL_CALLS] [ARGS]"),
    "plain": ("other", "-"),
}


@pytest.fixture(scope="module")
def walker() -> Walker:
    return Walker(Tokenizer(byte_level()), STOP_TOKENS)


def with_tokens(syntax: Syntax) -> Tokenizer:
    built = tokenizers.Tokenizer.from_str(byte_level().to_str())
    built.add_special_tokens(list(syntax.visible_tokens))
    return Tokenizer(built)


def check_schemas(walker: Walker, seeds: range) -> int:
    ended = 0
    for seed in seeds:
        rng = random.Random(seed)
        schema = random_schema(rng)
        text = walker.walk(grammar_of(Format("schema", schema)), rng)
        if text is not None:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
            ended += 1
    return ended


def test_grammar_output_validates(walker: Walker):
    assert check_schemas(walker, range(100)) >= 95


@pytest.mark.slow
def test_grammar_output_validates_for_many_schemas(walker: Walker):
    assert check_schemas(walker, range(100, 1500)) >= 1300


def test_any_object(walker: Walker):
    for seed in range(5):
        text = walker.walk(grammar_of(Format("json")), random.Random(seed))
        assert text is None or isinstance(json.loads(text), dict)


def test_custom_grammars(walker: Walker):
    assert walker.walk(grammar_of(Format("regex", "a/b{3}")), random.Random(0)) == "a/bbb"
    assert walker.walk(grammar_of(Format("lark", 'start: X " " X\nX: "on"')), random.Random(0)) == "on on"


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("not", {"type": "string"}),
        ("if", {"required": ["a"]}),
        ("then", {"required": ["a"]}),
        ("else", {"required": ["a"]}),
        ("patternProperties", {"^x": {"type": "integer"}}),
        ("propertyNames", {"pattern": "^a"}),
        ("dependentSchemas", {"a": {"required": ["b"]}}),
        ("dependentRequired", {"a": ["b"]}),
        ("dependencies", {"a": ["b"]}),
        ("unevaluatedProperties", False),
        ("unevaluatedItems", False),
        ("uniqueItems", True),
        ("contains", {"type": "integer"}),
        ("minContains", 2),
        ("maxContains", 2),
        ("minProperties", 2),
        ("$dynamicRef", "#x"),
        ("$recursiveRef", "#"),
    ],
)
def test_unenforceable_keywords_are_refused_by_name_and_path(keyword: str, value: Any):
    schema = {"type": "object", "properties": {"list": {"type": "array", "items": {keyword: value}}}}
    with pytest.raises(InputError) as refused:
        grammar_of(Format("schema", schema))
    assert repr(keyword) in str(refused.value)
    assert "#/properties/list/items" in str(refused.value)


def test_property_named_like_a_keyword(walker: Walker):
    schema = {"type": "object", "properties": {"not": {"const": 1}}, "required": ["not"], "additionalProperties": False}
    assert json.loads(walker.walk(grammar_of(Format("schema", schema)), random.Random(0)) or "") == {"not": 1}


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ("text", 'must be an object, not "text"'),
        (True, "must be an object, not true"),
        ({"type": "string", "format": "colour"}, 'the format "colour" at #; the supported formats: date-time'),
        ({"$ref": "https://example.org/x"}, "only references within the schema"),
        ({"$ref": "#/$defs/none"}, "cannot be enforced"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "strang"}, "Invalid type: strang"),
        ({"enum": []}, "cannot be enforced"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "minimum"),
        ({"properties": []}, "at #/properties"),
        ({"properties": {"a": 3}}, "3 at #/properties/a, where a schema is required"),
        ({"oneOf": [{"type": "object"}, {"type": "object"}]}, "oneOf"),
        ({"description": "x" * 200_000}, "the limit is 131,072"),
    ],
)
def test_unenforceable_schemas_are_refused(schema: Any, sentence: str):
    with pytest.raises(InputError) as refused:
        grammar_of(Format("schema", schema))
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_deep_schemas_are_refused():
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(70):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InputError, match="64 levels deep"):
        grammar_of(Format("schema", schema))


def test_keywords_without_effect_are_dropped():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "format": "int32"}, "b": {"type": "array", "uniqueItems": False}},
        "minProperties": 1,
        "required": ["a"],
        "x-guidance": {"lenient": True},
    }
    found = prepare_schema(schema)
    assert found["properties"] == {"a": {"type": "integer"}, "b": {"type": "array"}}
    assert "minProperties" not in found
    assert found["x-guidance"]["lenient"] is False


@pytest.mark.parametrize("format", [Format("lark", 'start: "a'), Format("regex", "a("), Format("lark", ""), Format("xml", "a")])
def test_invalid_formats_are_refused(format: Format):
    with pytest.raises(InputError):
        grammar_of(format)


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", sorted(SYNTAXES))
def test_required_call_round_trip(name: str, tokens: bool):
    syntax = find_syntax(*SYNTAXES[name])
    assert syntax.name == name
    tokenizer = with_tokens(syntax) if tokens else Tokenizer(byte_level())
    walker = Walker(tokenizer, STOP_TOKENS)
    closing = [token for token in syntax.visible_tokens if token in syntax.call_template.closing + syntax.call_template.end]
    last = tuple(number for token in closing if (number := tokenizer.token_id(token)))
    grammar = grammar_for(Conversation([], tools=TOOLS, tool_choice="required"), syntax, "</think>", tokenizer)
    assert grammar is not None
    ended = 0
    for seed in range(6):
        text = walker.walk(grammar, random.Random(seed), last=last)
        if text is None:
            continue
        ended += 1
        parser = syntax.parser("</think>", TOOLS)
        deltas = [*parser.feed(text), *parser.finish()]
        assert not [each for each in deltas if isinstance(each, Content)]
        begins = [each for each in deltas if isinstance(each, ToolCallBegin)]
        assert begins
        for call in begins:
            given = json.loads("".join(s.text for s in deltas if isinstance(s, ToolCallArguments) and s.index == call.index))
            jsonschema.validate(given, WEATHER if call.name == "get_weather" else {"maxProperties": 0})
    # a tagged string ends only when the walk hits its end tag by chance, unless that is a token
    assert ended or name in ("coder", "minimax") or (name in ("harmony", "glm") and not tokens)


def test_single_call_without_parallel_tool_calls():
    syntax = find_syntax(*SYNTAXES["hermes"])
    tokenizer = with_tokens(syntax)
    conversation = Conversation([], tools=TOOLS, tool_choice=NamedTool("now"), parallel_tool_calls=False)
    text = Walker(tokenizer, STOP_TOKENS).walk(grammar_for(conversation, syntax, "</think>", tokenizer) or "", random.Random(0))
    assert text is not None
    assert text.startswith('<tool_call>\n{"name": "now", "arguments": {')
    assert text.count("<tool_call>") == 1


@pytest.mark.parametrize("name", sorted(SYNTAXES))
def test_reasoning_before_structured_output(name: str):
    syntax = find_syntax(*SYNTAXES[name])
    tokenizer = with_tokens(syntax)
    last = tuple(number for token in ("</think>", "<|end|>", "<|message|>") if (number := tokenizer.token_id(token)))
    tail = "<|start|>assistant" if name == "harmony" else "<think>\n"
    grammar = grammar_for(Conversation([], format=Format("schema", SCHEMA)), syntax, tail, tokenizer)
    text = Walker(tokenizer, STOP_TOKENS).walk(grammar or "", random.Random(1), last=last)
    assert text is not None
    parser = syntax.parser(tail, TOOLS)
    deltas = [*parser.feed(text), *parser.finish()]
    assert isinstance(deltas[0], Reasoning) or name == "harmony"
    jsonschema.validate(json.loads("".join(s.text for s in deltas if isinstance(s, Content))), SCHEMA)


def test_format_with_tools_allows_answer_or_calls():
    syntax = find_syntax(*SYNTAXES["hermes"])
    tokenizer = with_tokens(syntax)
    grammar = grammar_for(Conversation([], tools=TOOLS, format=Format("schema", SCHEMA)), syntax, "</think>", tokenizer)
    outputs = [Walker(tokenizer, STOP_TOKENS).walk(grammar or "", random.Random(seed)) for seed in range(12)]
    assert {text[:1] for text in outputs if text} == {"{", "<"}


def test_unconstrained_answer_has_no_grammar():
    syntax = find_syntax(*SYNTAXES["hermes"])
    assert grammar_for(Conversation([], tools=TOOLS), syntax, "") is None
    assert grammar_for(Conversation([], tools=TOOLS, tool_choice="none"), syntax, "") is None


def test_tool_choice_must_name_a_tool():
    syntax = find_syntax(*SYNTAXES["hermes"])
    with pytest.raises(InputError, match="'none_such', which is not one of the tools"):
        grammar_for(Conversation([], tools=TOOLS, tool_choice=NamedTool("none_such")), syntax, "")
    with pytest.raises(InputError, match="there are no tools"):
        grammar_for(Conversation([], tool_choice="required"), syntax, "")


def test_invalid_tool_name_is_refused():
    with pytest.raises(InputError, match="letters, digits"):
        grammar_for(
            Conversation([], tools=[{"function": {"name": 'a"b'}}], tool_choice="required"), find_syntax("llama", None), ""
        )


def test_malformed_parameter_schemas():
    for name in SYNTAXES:
        for parameters in ("x", {"properties": [1]}, {"properties": {"a": {"type": [["b"]]}}}, {"required": 3, "enum": 4}):
            tool = {"function": {"name": "f", "parameters": parameters}}
            with contextlib.suppress(InputError):
                grammar_for(Conversation([], tools=[tool], tool_choice="required"), find_syntax(*SYNTAXES[name]), "")
            text = "<tool_call><function=f><parameter=a b>1</parameter></function></tool_call>"
            find_syntax(*SYNTAXES[name]).parser("", [tool]).feed(text)


def test_only_strict_tools_are_refused_as_unenforceable():
    syntax = find_syntax(*SYNTAXES["hermes"])
    loose = {"name": "f", "parameters": {"type": "object", "propertyNames": {"pattern": "a"}}}
    assert grammar_for(Conversation([], tools=[{"function": loose}], tool_choice="required"), syntax, "") is not None
    with pytest.raises(InputError, match="'propertyNames' at #"):
        grammar_for(Conversation([], tools=[{"function": {**loose, "strict": True}}], tool_choice="required"), syntax, "")
