"""The kernel that attends to codes on a CPU: the first below that does not refuse.

Codes are multiplied in int8 unless exact products are wanted, however many tokens are new: a token's result does not depend on
that.
"""

from typing import NamedTuple

from auraflux.ops._dispatch import is_exact
from auraflux.ops.routes import Route, Routes
from auraflux.ops.simd.jit import Kernel
from auraflux.ops.turboquant.arrangement import Arrangement
from auraflux.ops.turboquant.cpu.attend import attend_float32, attend_int8
from auraflux.ops.turboquant.cpu.codec import CHUNK
from auraflux.ops.turboquant.pages import CodePages


class Attend(NamedTuple):
    """Arguments that decide the route.

    tokens  new ones, of all sequences
    """

    tokens: int
    pages: CodePages


def not_rows(pages: CodePages) -> str | None:
    """Return why no kernel here reads pages, or None."""
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


def _refuses_float32(call: Attend) -> str | None:
    return not_rows(call.pages)


ATTEND: Routes[Attend, Kernel | None] = Routes(
    Route("no new tokens", _refuses_nothing, lambda call: None),
    Route("attend_int8", _refuses_int8, lambda call: attend_int8),
    Route("float32", _refuses_float32, lambda call: attend_float32),
)
ROUTES = {"turboquant_attention": ATTEND, "turboquant_partials": ATTEND}
