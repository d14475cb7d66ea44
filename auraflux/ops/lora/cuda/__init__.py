"""Adapters on CUDA: in the launches of products where their kernels can, otherwise after them.

After products, few tokens are one launch for all weights; prompts are torch's matrix products for all adapters at once.
Ranks are small: the product with all adapters, of which a mask selects each row's, costs less than to gather their matrices.
"""

from collections.abc import Sequence

from torch import Tensor

from auraflux.ops._dispatch import Declined, is_invariant
from auraflux.ops.gpu.device import ready
from auraflux.ops.linear.adapters import Adapters
from auraflux.ops.linear.cuda.call import Call, Norm
from auraflux.ops.linear.reference import Weight
from auraflux.ops.lora.cuda.after_products import add_to
from auraflux.ops.lora.cuda.routes import PRODUCTS, LoraCall
from auraflux.ops.lora.inputs import LinearInput

__all__ = ["add_lora", "lora_gate_up", "lora_linears"]


def add_lora(inputs: LinearInput, ys: Sequence[Tensor], adapters: Adapters, overlap: bool = False) -> None:
    _check(inputs, adapters)
    if any(y.dtype is not inputs.x.dtype for y in ys):
        raise Declined("products and activations have different dtypes")
    if inputs.x.numel():
        add_to(ys, inputs, adapters, overlap)


def lora_linears(
    inputs: LinearInput, weights: Sequence[Weight], adapters: Adapters, biases: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    return _run(inputs, weights, adapters, biases, False)


def lora_gate_up(inputs: LinearInput, gate: Weight, up: Weight, adapters: Adapters) -> tuple[Tensor, Tensor]:
    total, (out,) = _run(inputs, (gate, up), adapters, None, True)
    return total, out


def _run(
    inputs: LinearInput, weights: Sequence[Weight], adapters: Adapters, biases: Sequence[Tensor | None] | None, gated: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    _check(inputs, adapters)
    norm = None if inputs.norm is None else Norm(inputs.delta, inputs.norm, inputs.eps)
    made = PRODUCTS(LoraCall(Call(inputs.x, weights, biases, gated=gated, norm=norm), inputs, adapters))
    return inputs.x if made.total is None else made.total, tuple(made.outs)


def _check(inputs: LinearInput, adapters: Adapters) -> None:
    ready(inputs.x)
    if is_invariant():
        raise Declined("prompts are multiplied by torch, whose matrix products depend on the batch")
    if any(each.dtype is not inputs.x.dtype for pair in adapters.pairs for each in pair):
        raise Declined("activations and adapters have different dtypes")
