"""Sandboxed Jinja environment of chat templates, which come with the weights and are untrusted code.

Jinja's sandbox denies access to Python's internals and changes to arguments. This one also bounds the length of strings before
each operation that builds one. Other uses of time and memory are limited from outside, by ending the process
(template_worker.py).
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

MAX_LENGTH = 1 << 24
MAX_BITS = 1 << 12
# characters that an element of a list counts as
ELEMENT = 16
# filters whose result may be far longer than their input, and that no chat template needs
DISABLED_FILTERS = ("batch", "filesizeformat", "pprint", "random", "slice", "sum", "urlize", "wordwrap", "xmlattr")
# filters that do not convert their input to text
NON_TEXT = (
    *("abs", "attr", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items", "last", "length"),
    *("list", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "unique"),
)
PADDING = ("center", "ljust", "rjust", "zfill", "to_bytes")
# a width or precision of five digits, or one taken from an argument
WIDE = re.compile(r"%(\([^)]*\))?[-#0 +]*(\d{0,4}\.)?(\*|\d{5})|\{[^{}]*:[^{}]*(\d{5}|\{)")


class Refused(TemplateError):
    """Error raised by the template itself, with raise_exception."""


class _Code(CodeGenerator):
    """Code generator that compiles `~` into a call with a length check."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")


class _Generation(Extension):
    """`{% generation %}` blocks, which select the training targets; rendering outputs their content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the globals that chat templates expect, and limits."""

    code_generator_class = _Code
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_weighed)
        self.filters = {name: _bounded(name, made) for name, made in self.filters.items() if name not in DISABLED_FILTERS}
        self.filters["tojson"] = _tojson
        self.globals = {name: self.globals[name] for name in ("range", "cycler", "joiner")}
        self.globals |= {"dict": _dict, "namespace": _Namespace}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def concat(self, pieces: Iterable[str]) -> str:
        return "".join(_gathered(pieces))

    def joined(self, values: tuple[Any, ...]) -> str:
        _weigh(values)
        return "".join(map(str, values))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _check_length(_length(left) + _length(right))
        elif operator == "*":
            _check_length(_length(left) * _times(right) + _length(right) * _times(left))
            _check_bits(_bits(left) + _bits(right))
        elif operator == "**":
            _check_bits(_bits(left) * _times(right))
        elif isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int):
            args = tuple(_checked(owner, __obj.__name__, args))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        made = super().wrap_str_format(value)
        if made is None:
            return None

        def formatted(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, (*args, *kwargs.values()))
            return made(*args, **kwargs)

        return formatted


class _Namespace(Namespace):
    """Namespace that rejects names with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}, which begins with an underscore")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: Any) -> NoReturn:
    raise Refused(str(message))


def _strftime_now(form: str) -> str:
    _check_format(form, ())
    return datetime.now().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    _weigh(value)
    # every line is indented once per level
    _check_length(max(_times(indent), _length(indent), *map(_length, separators or ()), 0) << 12)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _bounded(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter with a check of the length of its result."""
    # some filters take the environment as first argument
    first = 1 if hasattr(made, "jinja_pass_arg") else 0

    @wraps(made)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        value, given = args[first], (*args[first + 1 :], *kwargs.values())
        if name == "join":
            value = _gathered(value)
            _check_length(len(value) * max([1, *map(_length, given)]))
            return made(*args[:first], value, *args[first + 1 :], **kwargs)
        if name not in NON_TEXT and not isinstance(value, str):
            _weigh(value)
        if name == "format":
            _check_format(str(value), given)
        elif name == "replace":
            _checked(str(value), "replace", given)
        elif name in ("center", "indent", "round"):
            lines = 1 + str(value).count("\n")
            _check_length(lines * max([0, *(_length(each) + _times(each) for each in given)]))
            _check_bits(max([0, *map(_times, given)]))
        return made(*args, **kwargs)

    return filtered


def _checked(owner: Any, name: str, given: Sequence[Any]) -> Sequence[Any]:
    """Refuse a method call on a string or number whose result would be too long; return the arguments to call it with."""
    if name in PADDING:
        _check_length(max([0, *map(_times, given)]))
    elif name == "replace" and len(given) >= 2 and isinstance(given[0], type(owner)):
        _check_length(len(owner) + owner.count(given[0]) * _length(given[1]))
    elif name == "join" and given:
        gathered = _gathered(given[0])
        _check_length(len(owner) * len(gathered))
        return [gathered, *given[1:]]
    elif name == "expandtabs":
        _check_length(len(owner) * max([8, *map(_times, given)]))
    elif name == "translate" and given and isinstance(given[0], Mapping):
        _check_length(len(owner) * max([1, *map(_length, given[0].values())]))
    return given


def _check_format(form: str, values: Sequence[Any]) -> None:
    _weigh(list(values))
    if WIDE.search(form):
        raise SecurityError(f"it pads text to a width that is too large or unknown: {form[:40]!r}")
    _check_length((form.count("%") + form.count("{")) * max([1, *map(_length, values)]))


def _gathered(values: Iterable[Any]) -> list[Any]:
    """Collect strings and values into a list, bounded by their total length."""
    found, length = [], 0
    for value in values:
        length += 1 + (len(value) if isinstance(value, str) else _weigh(value))
        _check_length(length)
        found.append(value)
    return found


def _weighed(value: Any) -> Any:
    if not isinstance(value, str):
        _weigh(value)
    return value


def _weigh(value: Any) -> int:
    """Estimate the length of a value's text and refuse one that is too long: a list may contain one list many times."""
    total, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            waiting += one
        total += ELEMENT + (len(one) if isinstance(one, str | bytes) else 0)
        _check_length(total)
    return total


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def _times(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise SecurityError(f"it builds more than {MAX_LENGTH:,} characters")


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise SecurityError(f"it computes with numbers of more than {MAX_BITS:,} bits")
