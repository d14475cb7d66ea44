"""Which implementation serves a call, remembered while kernels are compiled.

For every `a + b` Numba goes through all ways to add, those of arrays and strings among them, until one takes the types; again
when it writes the code. A kernel asks the same a thousand times; here it asks once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import types
from numba.core.targetconfig import ConfigStack

_Function: Any = types.Function
_ask = _Function.get_call_type
_known: dict[Any, tuple[Any, Any]] = {}  # the signature a call was found to have, and what implements it


def _flags() -> Any:
    """How functions that are compiled on the way are to be compiled."""
    top = ConfigStack.top_or_none()
    return None if top is None else tuple((name, str(value)) for name, value in top._values.items())


def _resolve(function: Any, context: Any, args: Any, kws: Any) -> Any:
    key = function, tuple(args), tuple(kws.items()), _flags()
    if (found := _known.get(key)) is not None:
        # functions of other flags may have asked since then
        function._impl_keys[found[0].args] = found[1]
        return found[0]
    signature = _ask(function, context, args, kws)
    if signature is not None and signature.return_type.is_precise():
        _known[key] = signature, function._impl_keys[signature.args]
    return signature


@contextmanager
def remembering() -> Iterator[None]:
    """Inside, calls are resolved once; Numba compiles one function at a time, so nobody else asks meanwhile."""
    before = _Function.get_call_type
    _Function.get_call_type = _resolve
    try:
        yield
    finally:
        _Function.get_call_type = before
