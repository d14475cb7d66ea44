"""Calls in Python syntax, parsed with `ast` and never executed: arguments must be literals."""

import ast
import json
import warnings
from typing import Any

from auraflux.serve.parse.calls import ToolCalls
from auraflux.serve.parse.text import NoMatch, Steps

# characters; longer text is not parsed as Python
LONGEST = 1 << 16


def python_calls(source: str, calls: ToolCalls) -> Steps[None]:
    """Emit the calls in a text: one, one per line, or a list; each of a known tool."""
    found = [_parse_call(node, calls) for node in _nodes(source)]
    if not found:
        raise NoMatch
    for name, given in found:
        yield calls.begin(name)
        yield calls.arguments(given)


def _nodes(source: str) -> list[ast.expr]:
    if len(source) > LONGEST:
        raise NoMatch
    try:
        # unknown escapes raise warnings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(source.strip()).body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as err:
        raise NoMatch from err
    nodes: list[ast.expr] = []
    for statement in body:
        if not isinstance(statement, ast.Expr | ast.Assign):
            raise NoMatch
        nodes += statement.value.elts if isinstance(statement.value, ast.List) else [statement.value]
    return nodes


def _parse_call(node: ast.expr, calls: ToolCalls) -> tuple[str, str]:
    if not isinstance(node, ast.Call):
        raise NoMatch
    name = ast.unparse(node.func)
    if name == "print" and name not in calls.tools and len(node.args) == 1:
        return _parse_call(node.args[0], calls)
    # Llama calls its built-in tools this way
    name = name if name in calls.tools else name.removesuffix(".call")
    if name not in calls.tools:
        raise NoMatch
    keys = list(calls.properties(name))
    if len(node.args) > len(keys):
        raise NoMatch
    pairs = [*zip(keys, node.args, strict=False), *((each.arg, each.value) for each in node.keywords)]
    try:
        given: dict[str, Any] = {key: ast.literal_eval(each) for key, each in pairs if key is not None}
        if len(given) != len(pairs):
            raise NoMatch
        return name, json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError, MemoryError) as err:
        raise NoMatch from err
