"""Grammars that constrain an answer: a response format, or tool calls in the model's syntax."""

import json
import re
from typing import Any

from auraflux.errors import InputError
from auraflux.serve.chat.conversation import Conversation, Format, NamedTool
from auraflux.serve.chat.json_schema import prepare_schema
from auraflux.serve.parse import Syntax
from auraflux.serve.parse.argument_tags import Tags, kinds_of
from auraflux.serve.parse.families.harmony import CHANNEL, END, HARMONY, MESSAGE, START
from auraflux.tokenizer.llguidance_limits import LONGEST, error_text, guidance, limits
from auraflux.tokenizer.tokenizer import Tokenizer

ANYTHING = "/(?s:.*)/"
# white space between reasoning and answer
GAP = r"/[ \n]{0,4}/"
NAME = re.compile(r"[\w.-]{1,256}")


def grammar_of(format: Format) -> str:
    """Return the validated grammar of a format; raise InputError if it cannot be enforced."""
    return _checked([_part(format)])


def grammar_for(conversation: Conversation, syntax: Syntax, prompt_tail: str, tokenizer: Tokenizer | None = None) -> str | None:
    """Return the grammar that constrains an answer; None for free text.

    prompt_tail  end of the prompt, which shows whether reasoning comes first
    tokenizer    None treats special tokens as text
    """
    tools = _tools(conversation)
    must_call = conversation.tool_choice == "required" or isinstance(conversation.tool_choice, NamedTool)
    if not must_call and conversation.format is None:
        return None
    lark = _Lark(syntax, tokenizer)
    alternatives = []
    if conversation.format is not None and not must_call:
        alternatives.append(lark.answer())
    if tools and (must_call or conversation.tool_choice == "auto"):
        alternatives.append(lark.calls(tools, conversation.parallel_tool_calls))
    lark.start(alternatives, prompt_tail)
    parts: list[dict[str, Any]] = [{"name": "text", "lark_grammar": "\n".join(lark.rules)}]
    if conversation.format is not None and not must_call:
        parts.append(_part(conversation.format))
    return _checked(parts)


def _tools(conversation: Conversation) -> list[dict[str, Any]]:
    """Return the tools that may be called."""
    functions = [tool["function"] for tool in conversation.tools]
    if isinstance(conversation.tool_choice, NamedTool):
        chosen = conversation.tool_choice.name
        functions = [each for each in functions if each["name"] == chosen]
        if not functions:
            raise InputError(f"tool_choice names {chosen!r}, which is not one of the tools.")
    if conversation.tool_choice == "required" and not functions:
        raise InputError("tool_choice is 'required', but there are no tools.")
    for each in functions:
        if not NAME.fullmatch(each["name"]):
            raise InputError(f"The tool name {each['name']!r} must consist of letters, digits, '_', '-' and '.'.")
    return functions


def _part(format: Format) -> dict[str, Any]:
    source = format.source
    if format.kind == "json":
        return {"name": "answer", "json_schema": prepare_schema({"type": "object"})}
    if format.kind == "schema":
        return {"name": "answer", "json_schema": prepare_schema(source)}
    if format.kind not in ("lark", "regex"):
        raise InputError(f"Unknown format {format.kind!r}; the formats: json, schema, lark, regex.")
    if not isinstance(source, str) or not source.strip() or len(source) > LONGEST:
        raise InputError(f"A grammar must be a string of 1 to {LONGEST:,} characters.")
    if format.kind == "regex":
        return {"name": "answer", "lark_grammar": f"start: /{guidance().regex_to_lark(source, '')}/"}
    return {"name": "answer", "lark_grammar": source}


def _checked(parts: list[dict[str, Any]]) -> str:
    grammar = json.dumps({"grammars": parts}, ensure_ascii=False)
    if len(grammar) > LONGEST * 2:
        raise InputError(
            f"The grammar of the answer and its tools has {len(grammar):,} characters; the limit is {LONGEST * 2:,}."
        )
    wrong, messages = guidance().LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    if wrong:
        raise InputError(f"The answer's format cannot be enforced: {error_text(messages[0])}.")
    return grammar


class _Lark:
    """Builder of Lark rules, with the special tokens of a syntax as tokens."""

    def __init__(self, syntax: Syntax, tokenizer: Tokenizer | None):
        self.syntax, self.rules = syntax, ["%llguidance {}"]
        ids = {} if tokenizer is None else {token: tokenizer.token_id(token) for token in syntax.visible_tokens}
        self._ids = {token: number for token, number in ids.items() if number is not None}
        self._special = re.compile("|".join(sorted(map(re.escape, self._ids), key=len, reverse=True)) or "(?!)")

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule and return its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def text(self, text: str) -> str:
        """Return the terminals of a literal text."""
        parts, at = [], 0
        for found in self._special.finditer(text):
            parts += [text[at : found.start()], f"<[{self._ids[found[0]]}]>"]
            at = found.end()
        parts.append(text[at:])
        return " ".join(part if n % 2 else _literal(part) for n, part in enumerate(parts) if part)

    def up_to(self, marker: str) -> str:
        """Return a rule for any text up to and including a marker."""
        if marker in self._ids:
            return f"{ANYTHING} {self.text(marker)}"
        return self.rule(ANYTHING, f"[suffix={_literal(marker)}]")

    def start(self, alternatives: list[str], prompt_tail: str) -> None:
        """Add the start rule: optional reasoning, then one of the alternatives."""
        body = f"({' | '.join(alternatives)})"
        if self.syntax.name == HARMONY.name:
            reasoning = self.rule(
                f"{self.text(f'{CHANNEL}analysis{MESSAGE}')} {self.up_to(END)} {self.text(f'{START}assistant')}"
            )
            body = f"{reasoning}* {body}"
        else:
            body = f"{self._reasoning(prompt_tail)} {body}"
        self.rules.append(f"start: {body}")

    def _reasoning(self, prompt_tail: str) -> str:
        tail = prompt_tail.rstrip()
        for opening, closing in self.syntax.think_tags:
            if tail.endswith(opening):
                return f"{self.up_to(closing)} {GAP}"
        if not self.syntax.may_think or any(tail.endswith(closing) for _, closing in self.syntax.think_tags):
            return ""
        opening, closing = self.syntax.think_tags[0]
        return f"({self.text(opening)} {self.up_to(closing)} {GAP})?"

    def answer(self) -> str:
        """Return a rule for an answer in the format."""
        if self.syntax.name == HARMONY.name:
            return self.rule(f"{self.text(f'{CHANNEL}final{MESSAGE}')} @answer")
        return "@answer"

    def calls(self, tools: list[dict[str, Any]], parallel: bool) -> str:
        """Return a rule for calls of these tools."""
        template = self.syntax.call_template
        one = self.rule(" | ".join(self._call(tool) for tool in tools))
        more = f"({self.text(template.between)} {one})*" if parallel and template.between is not None else ""
        return self.rule(f"{self.text(template.opening)} {one} {more} {self.text(template.closing)}")

    def _call(self, tool: dict[str, Any]) -> str:
        template, schema = self.syntax.call_template, _object(tool.get("parameters"))
        tags = template.argument_tags
        given = self._json(schema, bool(tool.get("strict"))) if tags is None else self._tagged(schema, tags)
        return self.rule(f"{self.text(template.name + tool['name'] + template.arguments)} {given} {self.text(template.end)}")

    def _json(self, schema: dict[str, Any], strict: bool = False) -> str:
        """Return a rule for JSON of a schema; a schema that is not strict is enforced as far as possible."""
        try:
            found = prepare_schema(schema)
            _checked([{"name": "answer", "json_schema": found}])
        except InputError:
            if strict:
                raise
            found = prepare_schema(schema, lenient=True)
        return self.rule(f"%json {json.dumps(found, ensure_ascii=False)}")

    def _tagged(self, schema: dict[str, Any], tags: Tags) -> str:
        """Return a rule for arguments between tags, in the schema's order; only those it names."""
        parts = []
        named, required = schema.get("properties"), schema.get("required")
        for key, value in named.items() if isinstance(named, dict) else ():
            if kinds_of(value, schema) == {"string"}:
                inside = self._string(value, tags.closing)
            else:
                inside = f"{self._json(_rooted(value, schema))} {_literal(tags.closing)}"
            body = f"{self.text(tags.opening(key))} {inside}"
            parts.append(body if isinstance(required, list) and key in required else f"({body})?")
        return self.rule(" ".join(parts) or '""')

    def _string(self, schema: dict[str, Any], end: str) -> str:
        allowed = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(allowed, list) and allowed:
            return f"({' | '.join(_literal(str(each)) for each in allowed)}) {_literal(end)}"
        return self.rule(ANYTHING, f"[suffix={_literal(end)}]")


def _object(parameters: Any) -> dict[str, Any]:
    """Return the schema of a tool's arguments; a tool without one takes no arguments."""
    return {
        "type": "object",
        **(parameters if isinstance(parameters, dict) and parameters else {"additionalProperties": False}),
    }


def _rooted(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Return a subschema with the definitions it may refer to."""
    named: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**named, **schema} if isinstance(schema, dict) else named


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
