"""Inputs for routing and combining: routers of real models, ties, expert groups, NaN, k from 1 to all."""

import torch

from auraflux.ops._cases import Args, Case
from auraflux.ops.moe._expert_cases import EXPERT_CASES
from auraflux.ops.moe._pool_cases import POOL_CASES
from auraflux.ops.moe.reference import combine, route, weigh_experts
from auraflux.ops.moe.routing import Routing

BF16 = torch.bfloat16


def scores(tokens: int, experts: int, routing: Routing, scale: float = 2.0, dtype: torch.dtype = torch.float32) -> Args:
    return {"logits": (torch.randn(tokens, experts) * scale).to(dtype), "routing": routing}


def biased(tokens: int, experts: int, routing: Routing) -> Args:
    return {**scores(tokens, experts, routing), "bias": torch.randn(experts) * 0.1}


def given(tokens: int, experts: int, routing: Routing) -> Args:
    ids = torch.stack([torch.randperm(experts)[: routing.k] for _ in range(tokens)]).int()
    return {"logits": torch.randn(tokens, experts) * 2, "ids": ids, "routing": routing}


def tied(tokens: int, experts: int, routing: Routing) -> Args:
    return {"logits": torch.randint(0, 3, (tokens, experts)).float(), "routing": routing}


def broken(routing: Routing) -> Args:
    logits = torch.randn(6, 16)
    logits[0, 3] = logits[1, :] = logits[5, :14] = torch.nan
    logits[2, :12] = logits[3, :] = -torch.inf
    logits[4, 7] = torch.inf
    return {"logits": logits, "routing": routing}


def softmax(k: int, renormalize: bool = True, scale: float = 1.0) -> Routing:
    return Routing(k, "softmax", renormalize, scale=scale)


def residual(*shape: int, shared: bool, gated: bool, dtype: torch.dtype = torch.float32) -> Args:
    return {
        "h": torch.randn(shape).to(dtype),
        "moe": torch.randn(shape).to(dtype),
        "shared": torch.randn(shape).to(dtype) if shared else None,
        "shared_gate": (torch.randn(shape[0]) * 3).to(dtype) if gated else None,
    }


DEEPSEEK = Routing(8, "sigmoid", True, groups=8, topk_groups=4, scale=2.5)
CHOSEN = Routing(4, "chosen", True)
SQRTSOFTPLUS = Routing(6, "sqrtsoftplus", True, scale=1.5)

CASES = [
    Case(route, "qwen-one-token", lambda: scores(1, 512, softmax(10)), bench=True),
    Case(route, "qwen-many-tokens", lambda: scores(333, 128, softmax(8)), bench=True),
    Case(route, "most-experts", lambda: scores(63, 512, softmax(16))),
    Case(route, "deepseek-one-token", lambda: biased(1, 256, DEEPSEEK), bench=True),
    Case(route, "deepseek-many-tokens", lambda: biased(100, 256, DEEPSEEK)),
    Case(route, "gpt-oss-one-token", lambda: scores(1, 128, CHOSEN)),
    Case(route, "gpt-oss-many-tokens", lambda: scores(333, 32, CHOSEN)),
    Case(route, "softmax-biased-one-token", lambda: biased(1, 64, softmax(6))),
    Case(route, "softmax-biased", lambda: biased(63, 33, softmax(5, False, 2.0))),
    Case(route, "gained", lambda: {**scores(7, 128, softmax(8)), "gain": torch.rand(128)}),
    Case(route, "deepseek-v4", lambda: biased(7, 256, SQRTSOFTPLUS)),
    Case(route, "sqrtsoftplus-far-out", lambda: scores(9, 64, SQRTSOFTPLUS, scale=60.0)),
    Case(weigh_experts, "one-token", lambda: given(1, 256, SQRTSOFTPLUS)),
    Case(weigh_experts, "many-tokens", lambda: given(63, 33, Routing(5, "sigmoid", False, scale=2.0))),
    Case(route, "all-experts", lambda: scores(5, 7, softmax(7))),
    Case(route, "one-expert", lambda: scores(3, 1, softmax(1, False))),
    Case(route, "not-renormalised", lambda: scores(63, 100, softmax(6, False, 2.0))),
    Case(route, "wide-scores", lambda: scores(9, 64, softmax(4), scale=100.0)),
    Case(route, "sigmoid-no-groups", lambda: scores(7, 33, Routing(5, "sigmoid", False))),
    Case(route, "all-groups-selected", lambda: biased(3, 48, Routing(24, "sigmoid", True, groups=4, topk_groups=4))),
    Case(route, "k-fills-groups", lambda: biased(3, 48, Routing(24, "sigmoid", True, groups=4, topk_groups=2))),
    Case(route, "softmax-groups", lambda: scores(7, 160, Routing(6, "softmax", False, groups=8, topk_groups=3, scale=16.0))),
    Case(route, "softmax-groups-ties", lambda: tied(20, 64, Routing(6, "softmax", True, groups=8, topk_groups=3))),
    Case(route, "softmax-groups-broken", lambda: broken(Routing(4, "softmax", True, groups=4, topk_groups=2))),
    Case(route, "ties-softmax", lambda: tied(20, 64, softmax(8))),
    Case(route, "ties-sigmoid", lambda: tied(20, 64, Routing(6, "sigmoid", True, groups=8, topk_groups=3))),
    Case(route, "ties-chosen", lambda: tied(20, 64, CHOSEN)),
    Case(route, "broken-softmax", lambda: broken(softmax(3))),
    Case(route, "broken-sigmoid", lambda: broken(Routing(4, "sigmoid", True, groups=4, topk_groups=2))),
    Case(route, "broken-chosen", lambda: broken(CHOSEN)),
    Case(route, "broken-chosen-unnormalized", lambda: broken(Routing(4, "chosen", False))),
    Case(route, "no-tokens", lambda: scores(0, 64, softmax(8))),
    Case(route, "bf16", lambda: scores(63, 128, softmax(8), dtype=BF16)),
    Case(combine, "one-token", lambda: residual(1, 4096, shared=True, gated=True), bench=True),
    Case(combine, "many-tokens", lambda: residual(100, 2048, shared=True, gated=True), bench=True),
    Case(combine, "unscaled", lambda: residual(3, 333, shared=True, gated=False)),
    Case(combine, "no-shared", lambda: residual(7, 100, shared=False, gated=False)),
    Case(combine, "odd-width", lambda: residual(5, 63, shared=True, gated=True)),
    Case(combine, "no-tokens", lambda: residual(0, 64, shared=True, gated=True)),
    Case(combine, "bf16", lambda: residual(3, 100, shared=True, gated=True, dtype=BF16), tol=4e-3),
    *EXPERT_CASES,
    *POOL_CASES,
]
