"""Expert kernels on CPU: the first route below that does not refuse a call.

Quantized experts are lists of products (`linear/cpu/products.py`), gate and up in one list where they share a format. Dense
experts are multiplied one after the other.
"""

from typing import Any, NamedTuple

from torch import Tensor

from auraflux.ops import route_speed as speed
from auraflux.ops.linear.cpu.routes import DRIVERS, PRODUCTS, unsupported_layout
from auraflux.ops.linear.cpu.routes import Call as Product
from auraflux.ops.moe.cpu.grouped import (
    Steps,
    dense_down,
    dense_gate_up,
    gate_up_one_list,
    gate_up_two_lists,
    quantized,
    quantized_down,
)
from auraflux.ops.moe.experts import Experts, SharedExpert
from auraflux.ops.moe.reference import mixture_by_steps
from auraflux.ops.moe.routing import Routing
from auraflux.ops.routes import Route, Routes
from auraflux.quant import QTensor

Next = list[tuple[Routes[Any, Any], Any]]
ONE_LIST, TWO_LISTS = Steps(gate_up_one_list, quantized_down), Steps(gate_up_two_lists, quantized_down)
DENSE = Steps(dense_gate_up, dense_down)


class MixtureCall(NamedTuple):
    """Arguments of `mixture`."""

    x: Tensor
    scores: Tensor
    routing: Routing
    experts: Experts
    h: Tensor
    bias: Tensor | None = None
    shared: Tensor | SharedExpert | None = None
    shared_gate: Tensor | None = None


def _misplaced(experts: Experts) -> str | None:
    if experts.slots is not None:
        return "experts are in the slots of a pool, which only GPU kernels look up"
    reasons = (unsupported_layout(stack) for stack in experts.stacks if isinstance(stack, QTensor))
    return next((reason for reason in reasons if reason is not None), None)


def _refuses_two_lists(experts: Experts) -> str | None:
    for stack in experts.stacks:
        if not isinstance(stack, QTensor):
            return "a projection is dense"
    return _misplaced(experts)


def _refuses_one_list(experts: Experts) -> str | None:
    if reason := _refuses_two_lists(experts):
        return reason
    same = quantized(experts.stacks[0]).format == quantized(experts.up).format
    return None if same else "gate and up have different formats"


def _refuses_dense(experts: Experts) -> str | None:
    if all(isinstance(stack, Tensor) for stack in experts.stacks):
        return _misplaced(experts)
    some = any(isinstance(stack, Tensor) for stack in experts.stacks)
    return "some projections are quantized, others dense" if some else _misplaced(experts) or "experts are quantized"


def _then_drivers(experts: Experts) -> Next:
    return [(DRIVERS, stack) for stack in experts.stacks]


def _never(call: MixtureCall) -> None:
    return None


def _then_experts(call: MixtureCall) -> Next:
    tables: Next = [(EXPERTS, call.experts)]
    if isinstance(call.shared, SharedExpert):
        inside = call.x.new_empty(call.x.shape[0], call.shared.inner)
        tables.append((PRODUCTS, Product(call.x, call.shared.first)))
        tables.append((PRODUCTS, Product(inside, (call.shared.down,))))
    return tables


EXPERTS: Routes[Experts, Steps] = Routes(
    Route("gate and up in one list", _refuses_one_list, lambda experts: ONE_LIST, _then_drivers),
    Route("gate and up in two lists", _refuses_two_lists, lambda experts: TWO_LISTS, _then_drivers),
    Route("dense experts one by one", _refuses_dense, lambda experts: DENSE, speed=speed.DENSE_MATVEC),
)
MIXTURES: Routes[MixtureCall, Tensor] = Routes(
    Route("step by step", _never, lambda call: mixture_by_steps(*call), _then_experts),
)
ROUTES: dict[str, Routes[Any, Any]] = {"expert_mlp": EXPERTS, "expert_parts": EXPERTS, "mixture": MIXTURES}
