"""Launch arguments as one structure: a NamedTuple of NamedTuples on both sides of a kernel launch.

Python fills the structure by name and hands `flatten(args)` to a kernel, which takes 64-bit words. The kernel reads them as the
same structure with `read_args`, and every function below it takes the structure or one part of it. A loop that is written as
LLVM IR takes its values as a structure too, with `named_values`.
"""

from collections.abc import Callable, Iterable
from functools import cache, wraps
from inspect import Parameter, Signature, signature
from itertools import chain
from typing import Any, get_type_hints

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

WORD = ir.IntType(64)


def flatten(args: Iterable[Iterable[int | float]]) -> Iterable[int | float]:
    """Return the words of a structure whose fields are NamedTuples of numbers."""
    return chain.from_iterable(args)


@cache
def _type_of(kind: Any) -> types.Type:
    if kind is int:
        return types.int64
    if kind is float:
        return types.float32
    return types.BaseTuple.from_types([_type_of(field) for field in get_type_hints(kind).values()], kind)


@intrinsic
def read_args(typingctx, kind, address):
    """Read a structure at an address: fields of type int as int64, of type float (a double) as float32."""
    result = _type_of(kind.instance_class)

    def codegen(context, b, signature, values):
        words = b.inttoptr(values[1], WORD.as_pointer())
        count = 0

        def read(expected):
            nonlocal count
            if isinstance(expected, types.BaseTuple):
                return context.make_tuple(b, expected, [read(field) for field in expected.types])
            word = b.load(b.gep(words, [ir.Constant(WORD, count)]))
            count += 1
            return word if expected is types.int64 else b.fptrunc(b.bitcast(word, ir.DoubleType()), ir.FloatType())

        return read(result)

    return result(kind, address), codegen


def named_values(kind: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let `build(b, *constants, values)` take `values` as a NamedTuple, where its caller passes one value after the other."""

    def wrap(build: Callable[..., None]) -> Callable[..., None]:
        *first, _ = signature(build).parameters.values()
        constants = len(first) - 1

        @wraps(build)
        def flat(b: Any, *given: Any) -> None:
            build(b, *given[:constants], kind(*given[constants:]))

        # shown as one parameter for each value
        fields = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in kind._fields]
        flat.__signature__ = Signature([*first, *fields])  # type: ignore[attr-defined]
        return flat

    return wrap
