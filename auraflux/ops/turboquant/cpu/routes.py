"""Which kernels attend to codes on a CPU: the first way below that does not refuse.

A sequence with one new token is attended to in int8 unless exact products are wanted. All else is in float32: few rows of
queries meet each key as it is decoded, many meet panels of decoded keys. What the tokens of a call belong to is known only to
the kernels: where there may be several kinds of sequences, several kernels are launched, each for its own.
"""

from typing import Any, NamedTuple

from auraflux.ops._dispatch import is_exact
from auraflux.ops.attention.cpu.prefill_tiles import PANEL
from auraflux.ops.routes import Route, Routes
from auraflux.ops.simd.jit import Kernel
from auraflux.ops.turboquant.arrangement import Arrangement
from auraflux.ops.turboquant.cpu.attend import attend_few_rows, attend_many_rows, attend_one_by_one
from auraflux.ops.turboquant.cpu.codec import CHUNK
from auraflux.ops.turboquant.pages import CodePages


class Attend(NamedTuple):
    """What the choice depends on.

    tokens  new ones, of all sequences
    heads   of queries
    """

    tokens: int
    heads: int
    pages: CodePages


class Rows(NamedTuple):
    """Tokens for the float32 kernels, of sequences with `fewest` new tokens or more, whose rows fill a panel from `many` on."""

    tokens: int
    fewest: int
    many: int


class Launch(NamedTuple):
    """A kernel for the sequences with so many new tokens."""

    kernel: Kernel
    fewest: int
    most: int


def not_rows(pages: CodePages) -> str | None:
    """Why no kernel here reads pages."""
    if pages.arrangement is Arrangement.ROWS:
        return None
    return f"values in {pages.arrangement.value}, an order for GPUs"


def _refuses_nothing(call: Attend) -> str | None:
    return not_rows(call.pages) or ("there are new tokens" if call.tokens else None)


def _refuses_int8(call: Attend) -> str | None:
    if reason := not_rows(call.pages):
        return reason
    if is_exact():
        return "exact products of float32 are wanted"
    if call.pages.key_book is not None or call.pages.value_book is not None:
        return "levels are given; it has the usual ones in its instructions"
    return f"width {call.pages.width} is not whole chunks of {CHUNK}" if call.pages.width % CHUNK else None


def _refuses_single(call: Attend) -> str | None:
    return f"{call.tokens} new tokens; it is for one" if call.tokens > 1 else _refuses_int8(call)


def _refuses_float32(call: Attend) -> str | None:
    return not_rows(call.pages)


def _rows(call: Attend, fewest: int) -> Rows:
    return Rows(call.tokens, fewest, max(-(-PANEL * call.pages.heads // call.heads), fewest))


def _refuses_few(call: Rows) -> str | None:
    if call.many == call.fewest:
        return f"{call.many} new tokens fill a panel"
    return f"{call.tokens} new tokens; it is for fewer than {call.many}" if call.tokens >= call.many else None


def _refuses_few_and_many(call: Rows) -> str | None:
    return f"{call.many} new tokens fill a panel" if call.many == call.fewest else None


def _never(call: Any) -> None:
    return None


def _few(call: Rows) -> Launch:
    return Launch(attend_few_rows, call.fewest, call.many - 1)


def _many(call: Rows) -> Launch:
    return Launch(attend_many_rows, call.many, call.tokens)


SINGLE = Launch(attend_one_by_one, 1, 1)
FLOAT32: Routes[Rows, list[Launch]] = Routes(
    Route("few rows", _refuses_few, lambda call: [_few(call)]),
    Route("few rows and panels", _refuses_few_and_many, lambda call: [_few(call), _many(call)]),
    Route("panels", _never, lambda call: [_many(call)]),
)
ATTEND: Routes[Attend, list[Launch]] = Routes(
    Route("no new tokens", _refuses_nothing, lambda call: []),
    Route("attend_int8", _refuses_single, lambda call: [SINGLE]),
    Route(
        "attend_int8 and float32",
        _refuses_int8,
        lambda call: [SINGLE, *FLOAT32(_rows(call, 2))],
        lambda call: [(FLOAT32, _rows(call, 2))],
    ),
    Route("float32", _refuses_float32, lambda call: FLOAT32(_rows(call, 1)), lambda call: [(FLOAT32, _rows(call, 1))]),
)
ROUTES = {"turboquant_attention": ATTEND, "turboquant_partials": ATTEND}
