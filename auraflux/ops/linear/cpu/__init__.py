"""Products with weights on CPU; `routes.py` selects the kernel."""

from collections.abc import Sequence

from torch import Tensor

from auraflux.ops.activation.cpu import swiglu
from auraflux.ops.linear.cpu.embedding import embed
from auraflux.ops.linear.cpu.routes import PRODUCTS, Call, Norm, Products
from auraflux.ops.linear.reference import Weight
from auraflux.ops.simd.jit import as_float, like

__all__ = [
    "add_norm_gate_up",
    "add_norm_linears",
    "add_norm_scores",
    "embed",
    "gate_up_swiglu",
    "linear",
    "linears",
]


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    rows = _rows(as_float(x))
    out = PRODUCTS(Call(rows, (weight,))).outs[0]
    if bias is not None:
        out += bias
    return out if rows is x else _shaped(out, x)


def linears(x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None] | None = None) -> tuple[Tensor, ...]:
    return _biased(PRODUCTS(Call(_rows(as_float(x)), weights)).outs, biases, x)


def add_norm_linears(
    x: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    made = _normed(x, delta, norm, eps, weights)
    assert made.total is not None
    return _restored(made.total, x), _biased(made.outs, biases, x)


def add_norm_scores(
    x: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    made = _normed(x, delta, norm, eps, weights)
    assert made.normed is not None
    assert made.total is not None
    return _restored(made.normed, x), _restored(made.total, x), _biased(made.outs, biases, x)


def add_norm_gate_up(
    x: Tensor, delta: Tensor | None, norm: Tensor, eps: float, gate: Weight, up: Weight
) -> tuple[Tensor, Tensor]:
    made = _normed(x, delta, norm, eps, (gate, up))
    assert made.total is not None
    return _restored(made.total, x), _shaped(swiglu(*made.outs), x)


def gate_up_swiglu(x: Tensor, gate: Weight, up: Weight) -> Tensor:
    return _shaped(swiglu(*PRODUCTS(Call(_rows(as_float(x)), (gate, up))).outs), x)


def _normed(x: Tensor, delta: Tensor | None, norm: Tensor, eps: float, weights: Sequence[Weight]) -> Products:
    """Add delta to the stream, normalise it and multiply it by the weights."""
    return PRODUCTS(Call(_rows(x), weights, Norm(None if delta is None else _rows(delta), norm, eps)))


def _rows(x: Tensor) -> Tensor:
    """Reshape x to [T, K]."""
    return x if x.dim() == 2 else x.view(-1, x.shape[-1])


def _restored(rows: Tensor, x: Tensor) -> Tensor:
    """Reshape a result [T, K] to the leading axes of x."""
    return rows if x.dim() == 2 else rows.view(x.shape)


def _shaped(out: Tensor, x: Tensor) -> Tensor:
    """Convert results [T, N] to the leading axes and the dtype of x."""
    return like(out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1]), x)


def _biased(outs: list[Tensor], biases: Sequence[Tensor | None] | None, x: Tensor) -> tuple[Tensor, ...]:
    for out, bias in zip(outs, biases or (), strict=False):
        if bias is not None:
            out += bias
    return tuple([_shaped(out, x) for out in outs])
