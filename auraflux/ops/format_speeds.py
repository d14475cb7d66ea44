"""Speed to expect of a weight format, before anything is measured.

`speed_of` looks up in the route tables of `linear` and `moe` which kernel multiplies by a weight of some format and shape, and
returns the speed stated there (`Route.speed`).
"""

import importlib
from typing import Any

import torch

from auraflux.ops._dispatch import Op
from auraflux.ops.explain import taken
from auraflux.ops.fake_gpu import HOPPER, Capability, use_fake_gpu
from auraflux.ops.linear.reference import linear
from auraflux.ops.moe.experts import Experts
from auraflux.ops.moe.reference import expert_mlp
from auraflux.ops.route_speed import RouteSpeed
from auraflux.ops.routes import Routes, explain_call
from auraflux.quant import QTensor, scale_count

NO_KERNEL = "no kernel"
TOP_K = 8  # experts per token of the example call


def speed_of(weight: torch.Tensor | QTensor, tokens: int, backend: str, gpu: Capability = HOPPER) -> RouteSpeed:
    """Return the speed to expect when tokens are multiplied by a weight [N, K] or a stack of experts [E, N, K].

    gpu  compute capability for the `cuda` backend; no GPU is needed
    """
    op, arguments = _call(weight, tokens, backend)
    if backend == "cuda":
        with use_fake_gpu(gpu):
            verdict = explain_call(op, backend, arguments)
    else:
        verdict = explain_call(op, backend, arguments)
    if verdict is None or verdict.taken is None:
        reason = "there is no route table" if verdict is None else verdict.refused[-1][1]
        return RouteSpeed(NO_KERNEL, f"the slow reference runs: {reason}")
    speeds = _speeds(op, backend)
    names = list(taken(verdict))
    return next((speeds[name] for name in reversed(names) if name in speeds), RouteSpeed(verdict.taken, "not measured"))


def _call(weight: torch.Tensor | QTensor, tokens: int, backend: str) -> tuple[Op, dict[str, Any]]:
    x = torch.empty(tokens, weight.shape[-1], dtype=torch.bfloat16 if backend == "cuda" else torch.float32)
    if len(weight.shape) == 2:
        return linear, {"x": x, "weight": weight}
    count, inner, hidden = weight.shape
    ids = torch.zeros(tokens, min(TOP_K, count), dtype=torch.int32)
    experts = Experts(weight, weight, fake_weight(weight, (count, hidden, inner)))
    return expert_mlp, {"x": x, "ids": ids, "weights": torch.empty(ids.shape), "experts": experts}


def fake_weight(like: torch.Tensor | QTensor, shape: tuple[int, ...]) -> Any:
    """Return an uninitialized weight of a format and shape; a dense one where the width is no multiple of the group size."""
    if isinstance(like, torch.Tensor):
        return torch.empty(shape, dtype=like.dtype)
    *stack, rows, width = shape
    if width % like.column_block:
        return torch.empty(shape, dtype=torch.float32)

    def allocate(part: torch.Tensor, count: int) -> torch.Tensor:
        blocks = (-(-rows // like.lanes), count, like.lanes) if like.lanes > 1 else (rows, count)
        return torch.empty(*stack, *blocks, dtype=part.dtype)

    groups = scale_count(like.kind, width, like.group)
    biases = None if like.biases is None else allocate(like.biases, groups)
    packed = allocate(like.packed, width * like.bits // 32)
    return QTensor(packed, allocate(like.scales, groups), biases, like.bits, like.group, shape, like.lanes)


def _speeds(op: Op, backend: str) -> dict[str, RouteSpeed]:
    """Return the speeds of all routes that a call of an op may take, by name."""
    module = importlib.import_module(f"auraflux.ops.{op.family}.{backend}.routes")
    tables = [table for table in vars(module).values() if isinstance(table, Routes)]
    # tables of other ops in the module may have routes of the same names: the op's own come last
    return {route.name: route.speed for table in (*tables, module.ROUTES[op.name]) for route in table if route.speed}
