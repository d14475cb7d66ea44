"""Routes of products on CPU, tried in order: the first that does not refuse multiplies.

Quantized weights run compiled drivers (`products.py`), weights of one format in one list. A driver quantizes activations to
int8 or int16, with FP8 to half precision, unless exact products are requested; it decides how many tokens to take at a time and
whether to unpack rows first. With AMX, several tokens are multiplied by tiles (`matrix_tiles.py`), with the same result.
Dense weights are read row by row (`dense.py`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from auraflux.ops import route_speed as speed
from auraflux.ops._dispatch import current_activation_bits
from auraflux.ops.linear.cpu.dense import multiply_rows
from auraflux.ops.linear.cpu.products import BLOCK, Driver, driver, multiply
from auraflux.ops.linear.reference import Weight
from auraflux.ops.norm.cpu import add_rms_norm, rms_norm
from auraflux.ops.route_speed import RouteSpeed
from auraflux.ops.routes import Route, Routes
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import as_float
from auraflux.quant import QTensor
from auraflux.quant.packing import CHUNK


class Norm(NamedTuple):
    """Residual update and norm before the products.

    delta   [T, K]  added to x, or None
    weight  [K]
    """

    delta: Tensor | None
    weight: Tensor
    eps: float


class Call(NamedTuple):
    """Tokens times weights.

    x        [T, K]  float32; where there is a norm, of any dtype
    weights  [N, K] each
    norm     applied to x first, or None
    """

    x: Tensor
    weights: Sequence[Weight]
    norm: Norm | None = None


class Products(NamedTuple):
    """Results of a call.

    outs    [T, N] of each weight, float32
    total   [T, K]  x + delta, where there is a norm
    normed  [T, K]  the normalised sum, where there is a norm
    """

    outs: list[Tensor]
    total: Tensor | None = None
    normed: Tensor | None = None


def unsupported_layout(weight: QTensor) -> str | None:
    """Return why no kernel supports a weight's row layout; None if one does."""
    if weight.lanes in (1, BLOCK):
        return None
    return f"rows are interleaved by {weight.lanes}; the kernels support 1 or {BLOCK}"


def _needs_more_than(bits: int) -> str | None:
    """Return why activations of so many bits are too few; None if they suffice."""
    needed = current_activation_bits()
    if needed <= bits:
        return None
    return "exact float32 products are requested" if needed == 32 else f"activations of {needed} bits are requested"


def _refuses_int8(weight: QTensor) -> str | None:
    return "FP8 codes are not integers" if weight.kind == "fp8" else _needs_more_than(8)


def _refuses_int16(weight: QTensor) -> str | None:
    if weight.kind == "fp8":
        return "FP8 codes are not integers"
    return _needs_more_than(16) if ISA.digits else "float32 products are as fast on this processor"


def _refuses_halves(weight: QTensor) -> str | None:
    if weight.kind != "fp8":
        return "codes are integers"
    if not ISA.half_products:
        return "half-precision products are not used on this processor"
    return _needs_more_than(8)


def _refuses_tiles(weight: QTensor) -> str | None:
    if not ISA.matrix_tiles:
        return "AMX is not there, or not used"
    if weight.kind == "fp8":
        return "FP8 codes are not integers"
    if weight.grid is not None:
        return "entries of a grid are decoded for registers"
    # the float32 steps of a group take longer than its products
    return None if weight.group >= CHUNK else f"groups of {weight.group} are as fast without AMX"


def _refuses_int8_tiles(weight: QTensor) -> str | None:
    return _refuses_tiles(weight) or _refuses_int8(weight)


def _refuses_int16_tiles(weight: QTensor) -> str | None:
    return _refuses_tiles(weight) or _refuses_int16(weight)


def _never(call: Any) -> None:
    return None


def _driver(weight: QTensor, activation_bits: int, by_tiles: bool = False) -> Driver:
    bits, group, _, storage = weight.format
    return driver(activation_bits, bits, group, storage, by_tiles)


def _refuses_norm_first(call: Call) -> str | None:
    return "there is no norm" if call.norm is None else None


def _norm_first(call: Call) -> Products:
    assert call.norm is not None
    delta, weight, eps = call.norm
    h, total = (rms_norm(call.x, weight, eps), call.x) if delta is None else add_rms_norm(delta, call.x, weight, eps)
    return Products(PRODUCTS(Call(as_float(h), call.weights)).outs, total, h)


def _refuses_codes(call: Call) -> str | None:
    first = call.weights[0]
    if not isinstance(first, QTensor):
        return "a weight is dense"
    for weight in call.weights[1:]:
        if not isinstance(weight, QTensor) or weight.format != first.format:
            return "the weights are not all quantized in one format"
    return unsupported_layout(first)


def _codes(call: Call) -> Products:
    weights: Any = call.weights
    return Products(multiply(DRIVERS(weights[0]), call.x, weights))


def _refuses_one_by_one(call: Call) -> str | None:
    return "there is one weight" if len(call.weights) == 1 else None


def _separately(call: Call) -> list[Call]:
    return [Call(call.x, (weight,)) for weight in call.weights]


def _one_by_one(call: Call) -> Products:
    return Products([PRODUCTS(each).outs[0] for each in _separately(call)])


def _refuses_rows(call: Call) -> str | None:
    weight = call.weights[0]
    return unsupported_layout(weight) if isinstance(weight, QTensor) else None


def _rows(call: Call) -> Products:
    weight: Any = call.weights[0]
    return Products([multiply_rows(call.x, weight)])


def _activations_in(
    bits: int, refuses: Callable[[QTensor], str | None], rate: RouteSpeed, by_tiles: bool = False
) -> Route[QTensor, Driver]:
    """Return the route that quantizes activations to so many bits; 32 for float32."""
    name = f"activations in {'float32' if bits == 32 else f'int{bits}'}{' with AMX' if by_tiles else ''}"
    return Route(name, refuses, partial(_driver, activation_bits=bits, by_tiles=by_tiles), speed=rate)


DRIVERS: Routes[QTensor, Driver] = Routes(
    _activations_in(8, _refuses_int8_tiles, speed.INT8_ACTIVATIONS, by_tiles=True),
    _activations_in(8, _refuses_int8, speed.INT8_ACTIVATIONS),
    Route("activations in half precision", _refuses_halves, partial(_driver, activation_bits=8), speed=speed.HALF_ACTIVATIONS),
    _activations_in(16, _refuses_int16_tiles, speed.INT16_ACTIVATIONS, by_tiles=True),
    _activations_in(16, _refuses_int16, speed.INT16_ACTIVATIONS),
    _activations_in(32, _refuses_tiles, speed.FLOAT32_ACTIVATIONS, by_tiles=True),
    _activations_in(32, _never, speed.FLOAT32_ACTIVATIONS),
)
PRODUCTS: Routes[Call, Products] = Routes(
    Route("norm first", _refuses_norm_first, _norm_first, lambda call: [(PRODUCTS, Call(call.x, call.weights))]),
    Route("codes", _refuses_codes, _codes, lambda call: [(DRIVERS, call.weights[0])]),
    Route("one by one", _refuses_one_by_one, _one_by_one, lambda call: [(PRODUCTS, each) for each in _separately(call)]),
    Route("dense rows", _refuses_rows, _rows, speed=speed.DENSE_MATVEC),
)
ROUTES = dict.fromkeys(
    ("linear", "linears", "add_norm_linears", "add_norm_scores", "add_norm_gate_up", "gate_up_swiglu"), PRODUCTS
)
