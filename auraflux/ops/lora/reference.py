"""Linear layers with adapters (LoRA); every row may have another adapter."""

from collections.abc import Sequence

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_shape, op
from auraflux.ops.activation.reference import swiglu
from auraflux.ops.linear.adapters import Adapters
from auraflux.ops.linear.reference import FLOAT_DTYPES, Weight, check_linears, linears
from auraflux.ops.lora.inputs import LinearInput
from auraflux.ops.norm.reference import add_rms_norm, check_add_rms_norm, rms_norm


def _check_input(inputs: LinearInput) -> None:
    x, delta, norm, eps = inputs.x, inputs.delta, inputs.norm, inputs.eps
    if norm is not None:
        check_add_rms_norm(x if delta is None else delta, x, norm, eps)
    elif delta is not None:
        raise InputError("'delta' is given without 'norm'; it is added to x before a norm.")
    check_shape("x", x, None, None)


def _check_adapters(x: Tensor, rows: Sequence[int], adapters: Adapters) -> None:
    """Refuse adapters that do not fit x and weights of so many rows."""
    slots, a, b = adapters.slots, adapters.a, adapters.b
    if not 0 < len(rows) == len(a) == len(b):
        raise InputError(
            f"{len(rows)} products, {len(a)} matrices a and {len(b)} matrices b were given; one of each is needed."
        )
    if [each is None for each in a] != [each is None for each in b] or not adapters.pairs:
        raise InputError(
            "matrices a and b belong together: give both of a weight, or neither, and both of one weight at least."
        )
    check_dtype("slots", slots, torch.int32)
    check_shape("slots", slots, x.shape[0])
    count = adapters.pairs[0][0].shape[0]
    for height, first, second in zip(rows, a, b, strict=True):
        if first is None or second is None:
            continue
        check_dense(x=x, slots=slots, a=first, b=second)
        for name, tensor in {"x": x, "a": first, "b": second}.items():
            check_dtype(name, tensor, *FLOAT_DTYPES)
        check_shape("a", first, count, None, x.shape[1])
        check_shape("b", second, count, first.shape[1], height)


def _check_add_lora(inputs: LinearInput, ys: Sequence[Tensor], adapters: Adapters, overlap: bool = False) -> None:
    _check_input(inputs)
    _check_adapters(inputs.x, [y.shape[-1] for y in ys], adapters)
    for y in ys:
        check_dense(x=inputs.x, ys=y)
        check_dtype("ys", y, *FLOAT_DTYPES)
        check_shape("ys", y, inputs.x.shape[0], None)


@op(check=_check_add_lora)
def add_lora(inputs: LinearInput, ys: Sequence[Tensor], adapters: Adapters, overlap: bool = False) -> None:
    """Add to the products of an input those with the adapter of each row; rows without one do not change.

    ys       [T, N]  of any N each, updated in place
    overlap          input and slots were complete when the kernel of the ys began: a GPU may read them before
    """
    h, _ = _normed(inputs)
    for y, a, b in zip(ys, adapters.a, adapters.b, strict=True):
        if a is not None and b is not None:
            _add(y, h, adapters.slots, a, b)


def _normed(inputs: LinearInput) -> tuple[Tensor, Tensor]:
    """Return the rows that weights multiply, and x + delta."""
    if inputs.norm is None:
        return inputs.x, inputs.x
    if inputs.delta is None:
        return rms_norm.reference(inputs.x, inputs.norm, inputs.eps), inputs.x
    return add_rms_norm.reference(inputs.delta, inputs.x, inputs.norm, inputs.eps)


def _add(y: Tensor, x: Tensor, slots: Tensor, a: Tensor, b: Tensor) -> None:
    count, rank, width = a.shape
    mine = slots[:, None] == torch.arange(count, dtype=torch.int32, device=slots.device)
    inner = (x.float() @ a.float().reshape(count * rank, width).T).view(len(x), count, rank)
    # not a product with the mask: another adapter's infinity must not become NaN
    inner = torch.where(mine[:, :, None], inner, 0.0)
    found = inner.view(len(x), count * rank) @ b.float().reshape(count * rank, -1)
    y.copy_(torch.where(mine.any(1, keepdim=True), (y.float() + found).to(y.dtype), y))


def _check_lora_linears(
    inputs: LinearInput, weights: Sequence[Weight], adapters: Adapters, biases: Sequence[Tensor | None] | None = None
) -> None:
    _check_input(inputs)
    check_linears(inputs.x, weights, biases)
    _check_adapters(inputs.x, [weight.shape[0] for weight in weights], adapters)


@op(check=_check_lora_linears)
def lora_linears(
    inputs: LinearInput, weights: Sequence[Weight], adapters: Adapters, biases: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Multiply an input by several weight matrices with the adapter of each row.

    weights, biases  see `linears`
    returns  (x + delta [T, K], the products, [T, N] for each weight), in x's dtype
    """
    h, total = _normed(inputs)
    found = linears.reference(h, weights, biases)
    add_lora.reference(LinearInput(h), found, adapters)
    return total, found


def _check_lora_gate_up(inputs: LinearInput, gate: Weight, up: Weight, adapters: Adapters) -> None:
    if tuple(up.shape) != tuple(gate.shape):
        raise InputError(f"'gate' has shape {list(gate.shape)}, 'up' {list(up.shape)}; they must be equal.")
    _check_lora_linears(inputs, (gate, up), adapters)


@op(check=_check_lora_gate_up)
def lora_gate_up(inputs: LinearInput, gate: Weight, up: Weight, adapters: Adapters) -> tuple[Tensor, Tensor]:
    """Apply the first half of an MLP with the adapter of each row, see `lora_linears`.

    returns  (x + delta [T, K], silu(gate product) * up product [T, N]), in x's dtype
    """
    total, products = lora_linears.reference(inputs, (gate, up), adapters)
    return total, swiglu.reference(*products)
