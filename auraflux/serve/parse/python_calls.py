"""Calls written as Python calls, read as syntax and never run: arguments must be literals."""

import ast
import json
import warnings
from typing import Any

from auraflux.serve.parse.calls import Calls
from auraflux.serve.parse.text import Broken, Steps

# characters; more are not read as Python
LONGEST = 1 << 16


def python_calls(source: str, calls: Calls) -> Steps[None]:
    """Tell the calls in a text: one, one a line, or a list of them; each of a tool there is."""
    found = [_read(node, calls) for node in _nodes(source)]
    if not found:
        raise Broken
    for name, given in found:
        yield calls.begin(name)
        yield calls.arguments(given)


def _nodes(source: str) -> list[ast.expr]:
    if len(source) > LONGEST:
        raise Broken
    try:
        # an escape that Python does not know is a warning
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(source.strip()).body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as err:
        raise Broken from err
    nodes: list[ast.expr] = []
    for statement in body:
        if not isinstance(statement, ast.Expr | ast.Assign):
            raise Broken
        nodes += statement.value.elts if isinstance(statement.value, ast.List) else [statement.value]
    return nodes


def _read(node: ast.expr, calls: Calls) -> tuple[str, str]:
    if not isinstance(node, ast.Call):
        raise Broken
    name = ast.unparse(node.func)
    if name == "print" and name not in calls.tools and len(node.args) == 1:
        return _read(node.args[0], calls)
    # Llama's tools of its own are called so
    name = name if name in calls.tools else name.removesuffix(".call")
    if name not in calls.tools:
        raise Broken
    keys = list(calls.properties(name))
    if len(node.args) > len(keys):
        raise Broken
    pairs = [*zip(keys, node.args, strict=False), *((each.arg, each.value) for each in node.keywords)]
    try:
        given: dict[str, Any] = {key: ast.literal_eval(each) for key, each in pairs if key is not None}
        if len(given) != len(pairs):
            raise Broken
        return name, json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError, MemoryError) as err:
        raise Broken from err
