"""Grammars of what an answer must be: a response format, or calls in the syntax of the model."""

import json
import re
from typing import Any

from auraflux.errors import InputError
from auraflux.run.guidance import LONGEST, guidance, limits, sentence
from auraflux.run.tokenizer import Tokenizer
from auraflux.serve.ask import Ask, Format, Named
from auraflux.serve.json_schema import ready
from auraflux.serve.parse import Syntax
from auraflux.serve.parse.harmony import CHANNEL, END, HARMONY, MESSAGE, START
from auraflux.serve.parse.tagged import Tags, kinds_of

ANYTHING = "/(?s:.*)/"
# white space between what is thought and what is said
GAP = r"/[ \n]{0,4}/"
NAME = re.compile(r"[\w.-]{1,256}")


def grammar_of(format: Format) -> str:
    """Give the grammar of a format, checked. InputError where it cannot be enforced."""
    return _checked([_part(format)])


def grammar_for(ask: Ask, syntax: Syntax, prompt_tail: str, tokenizer: Tokenizer | None = None) -> str | None:
    """Give the grammar an answer must follow; None where it may be anything.

    prompt_tail  the end of the prompt, which shows whether the model thinks first
    tokenizer    the model's; without it marks are taken to be text, not tokens
    """
    tools = _tools(ask)
    must_call = ask.tool_choice == "required" or isinstance(ask.tool_choice, Named)
    if not must_call and ask.format is None:
        return None
    lark = _Lark(syntax, tokenizer)
    wanted = []
    if ask.format is not None and not must_call:
        wanted.append(lark.answer())
    if tools and (must_call or ask.tool_choice == "auto"):
        wanted.append(lark.calls(tools, ask.parallel))
    lark.start(wanted, prompt_tail)
    parts: list[dict[str, Any]] = [{"name": "text", "lark_grammar": "\n".join(lark.rules)}]
    if ask.format is not None and not must_call:
        parts.append(_part(ask.format))
    return _checked(parts)


def _tools(ask: Ask) -> list[dict[str, Any]]:
    """The tools that may be called."""
    functions = [tool["function"] for tool in ask.tools]
    if isinstance(ask.tool_choice, Named):
        chosen = ask.tool_choice.name
        functions = [each for each in functions if each["name"] == chosen]
        if not functions:
            raise InputError(f"tool_choice names {chosen!r}, which is none of the tools.")
    if ask.tool_choice == "required" and not functions:
        raise InputError("tool_choice is 'required', but there are no tools.")
    for each in functions:
        if not NAME.fullmatch(each["name"]):
            raise InputError(f"A tool's name must be letters, digits, '_', '-' or '.', which {each['name']!r} is not.")
    return functions


def _part(format: Format) -> dict[str, Any]:
    source = format.source
    if format.kind == "json":
        return {"name": "answer", "json_schema": ready({"type": "object"})}
    if format.kind == "schema":
        return {"name": "answer", "json_schema": ready(source)}
    if format.kind not in ("lark", "regex"):
        raise InputError(f"There is no format {format.kind!r}; there are: json, schema, lark, regex.")
    if not isinstance(source, str) or not source.strip() or len(source) > LONGEST:
        raise InputError(f"A grammar must be a text of 1 to {LONGEST:,} characters.")
    if format.kind == "regex":
        return {"name": "answer", "lark_grammar": f"start: /{guidance().regex_to_lark(source, '')}/"}
    return {"name": "answer", "lark_grammar": source}


def _checked(parts: list[dict[str, Any]]) -> str:
    grammar = json.dumps({"grammars": parts}, ensure_ascii=False)
    if len(grammar) > LONGEST * 2:
        raise InputError(
            f"The formats of answer and tools have {len(grammar):,} characters; at most {LONGEST * 2:,} are taken."
        )
    wrong, messages = guidance().LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    if wrong:
        raise InputError(f"The answer's format cannot be enforced: {sentence(messages[0])}.")
    return grammar


class _Lark:
    """Writes rules, with the marks of a syntax as the tokens they are."""

    def __init__(self, syntax: Syntax, tokenizer: Tokenizer | None):
        self.syntax, self.rules = syntax, ["%llguidance {}"]
        ids = {} if tokenizer is None else {mark: tokenizer.token_id(mark) for mark in syntax.shows}
        self._ids = {mark: number for mark, number in ids.items() if number is not None}
        self._marks = re.compile("|".join(sorted(map(re.escape, self._ids), key=len, reverse=True)) or "(?!)")

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule and give its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def text(self, text: str) -> str:
        """Write a text that stands in the answer."""
        parts, at = [], 0
        for found in self._marks.finditer(text):
            parts += [text[at : found.start()], f"<[{self._ids[found[0]]}]>"]
            at = found.end()
        parts.append(text[at:])
        return " ".join(part if n % 2 else _literal(part) for n, part in enumerate(parts) if part)

    def up_to(self, mark: str) -> str:
        """Write anything up to a mark, and the mark."""
        if mark in self._ids:
            return f"{ANYTHING} {self.text(mark)}"
        return self.rule(ANYTHING, f"[suffix={_literal(mark)}]")

    def start(self, wanted: list[str], prompt_tail: str) -> None:
        """Write the whole: what is thought, then one of what is wanted."""
        body = f"({' | '.join(wanted)})"
        if self.syntax.name == HARMONY.name:
            thought = self.rule(
                f"{self.text(f'{CHANNEL}analysis{MESSAGE}')} {self.up_to(END)} {self.text(f'{START}assistant')}"
            )
            body = f"{thought}* {body}"
        else:
            body = f"{self._thought(prompt_tail)} {body}"
        self.rules.append(f"start: {body}")

    def _thought(self, prompt_tail: str) -> str:
        tail = prompt_tail.rstrip()
        for opening, closing in self.syntax.think:
            if tail.endswith(opening):
                return f"{self.up_to(closing)} {GAP}"
        if not self.syntax.thinks or any(tail.endswith(closing) for _, closing in self.syntax.think):
            return ""
        opening, closing = self.syntax.think[0]
        return f"({self.text(opening)} {self.up_to(closing)} {GAP})?"

    def answer(self) -> str:
        """Write an answer that follows the format."""
        if self.syntax.name == HARMONY.name:
            return self.rule(f"{self.text(f'{CHANNEL}final{MESSAGE}')} @answer")
        return "@answer"

    def calls(self, tools: list[dict[str, Any]], parallel: bool) -> str:
        """Write calls of these tools."""
        form = self.syntax.form
        one = self.rule(" | ".join(self._call(tool) for tool in tools))
        more = f"({self.text(form.between)} {one})*" if parallel and form.between is not None else ""
        return self.rule(f"{self.text(form.opening)} {one} {more} {self.text(form.closing)}")

    def _call(self, tool: dict[str, Any]) -> str:
        form, schema = self.syntax.form, _object(tool.get("parameters"))
        tagged = form.tagged
        given = self._json(schema, bool(tool.get("strict"))) if tagged is None else self._tagged(schema, tagged)
        return self.rule(f"{self.text(form.name + tool['name'] + form.arguments)} {given} {self.text(form.end)}")

    def _json(self, schema: dict[str, Any], strict: bool = False) -> str:
        """Write JSON as a schema says; a tool that does not ask for strictness gets as much of it as can be enforced."""
        try:
            found = ready(schema)
            _checked([{"name": "answer", "json_schema": found}])
        except InputError:
            if strict:
                raise
            found = ready(schema, lenient=True)
        return self.rule(f"%json {json.dumps(found, ensure_ascii=False)}")

    def _tagged(self, schema: dict[str, Any], tags: Tags) -> str:
        """Write arguments between tags, in the order of the schema; only those it names."""
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
    """The schema of a tool's arguments; a tool that has none takes none."""
    return {
        "type": "object",
        **(parameters if isinstance(parameters, dict) and parameters else {"additionalProperties": False}),
    }


def _rooted(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """A part of a schema, with what it may refer to."""
    named: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**named, **schema} if isinstance(schema, dict) else named


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
