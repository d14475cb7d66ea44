"""Routes of products with adapters on CUDA: in the launch of the product, or after it."""

from typing import NamedTuple

import torch

from auraflux.ops.linear.adapters import Adapters
from auraflux.ops.linear.cuda import adapted, limits
from auraflux.ops.linear.cuda.call import Call, FusedNorm, Products
from auraflux.ops.linear.cuda.matvec import int4 as matvec_int4
from auraflux.ops.linear.cuda.routes import PRODUCTS as BASE_PRODUCTS
from auraflux.ops.lora.cuda.after_products import multiply_then_add
from auraflux.ops.lora.inputs import LinearInput
from auraflux.ops.routes import Route, Routes


class LoraCall(NamedTuple):
    """Tokens times weights, and times the adapters of these weights."""

    product: Call
    inputs: LinearInput
    adapters: Adapters


def _not_in_launch(call: LoraCall) -> str | None:
    return adapted.refuses(call.inputs.x, call.adapters)


def _matvec_int4(call: LoraCall) -> Products:
    outs, product = call.product.outs(), call.product
    if product.norm is None:
        matvec_int4.multiply(product.x, product.quantized, outs, product.gated, adapters=call.adapters)
        return Products(outs)
    fused = _fused(product)
    matvec_int4.multiply(product.x, product.quantized, outs, product.gated, fused, call.adapters)
    return Products(outs, fused.total)


def _fused(call: Call) -> FusedNorm:
    """Return a call's norm with a buffer for x + delta; x itself where there is no delta."""
    assert call.norm is not None
    delta, weight, eps = call.norm
    return FusedNorm(delta, weight, call.x if delta is None else torch.empty_like(call.x), float(eps))


def _after(call: LoraCall) -> Products:
    product = call.product
    return multiply_then_add(call.inputs, product.weights, product.biases, product.gated, call.adapters)


def _base(call: LoraCall) -> Call:
    return Call(call.product.x, call.product.weights, call.product.biases, norm=call.product.norm)


PRODUCTS: Routes[LoraCall, Products] = Routes(
    Route("matvec_int4", lambda call: limits.MATVEC_INT4(call.product) or _not_in_launch(call), _matvec_int4),
    Route("after the products", lambda call: None, _after, lambda call: [(BASE_PRODUCTS, _base(call))]),
)
ROUTES = dict.fromkeys(("lora_linears", "lora_gate_up"), PRODUCTS)
