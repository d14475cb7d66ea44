"""Expert kernels for few tokens on Hopper, on numpy."""

import numpy as np
import pytest
import torch

from auraflux.ops._cases import relative_rms
from auraflux.ops.moe._expert_cases import layer
from auraflux.ops.moe.cuda.matvec.few_tokens import Router, SlotShape
from auraflux.ops.moe.cuda.matvec.few_tokens_launch import DOWN_WARPS, LATE_WARPS, UP_WARPS
from auraflux.ops.moe.cuda.stacks import Epilogue
from auraflux.ops.moe.experts import Experts, SharedExpert
from auraflux.ops.moe.reference import combine, expert_mlp, expert_parts, mixture, route
from auraflux.ops.moe.routing import Routing
from tests.emulator.experts import passed, placed, slot_kernels
from tests.emulator.ptx import Device

TOL = 6e-3  # intermediate results are bf16
ROWS = (0, 7)  # of the result, in sixteens
GIVEN = {"E": 0, "SCORING": ""}
TILES = 3  # of a program of `up_slots` with TMA; without, it has one


def run(
    x, ids, weights, scores, bias, scale, added, experts: Experts, k: int, rule: dict, out, shared=None, early: bool = True
) -> None:
    """Run all of `up_slots`, and the programs of `down_slots` that compute ROWS."""
    tiles, warps = (TILES, UP_WARPS) if early else (1, LATE_WARPS)
    shape = SlotShape(experts.hidden, k, rule["E"], rule["SCORING"], rule["RENORMALIZE"], tiles, warps)
    device, inner, hidden, slots = Device(), experts.inner, experts.hidden, k if shared is None else k + 1

    between = torch.full((x.shape[0] * slots, inner), float("nan"), dtype=torch.bfloat16)
    inputs, hiddens, results = (placed(device, one) for one in (x, between, out))
    router = [placed(device, one) for one in (ids, scores, bias)]
    own = (None,) * 3 if shared is None else (shared.gate, shared.up, shared.down)
    gate, up, down = (passed(device, stack) for stack in (experts.gate, experts.up, experts.down))
    own_gate, own_up, own_down = (passed(device, weight) for weight in own)
    programs = -(-slots * inner // 16 // tiles)
    for token in range(x.shape[0]):
        for program in range(programs):
            kernel = slot_kernels(device, warps, programs, program, token, early=early)["up_slots"]
            kernel(inputs, *router, gate, up, own_gate, own_up, hiddens, experts.count, inner, shape)
    given = router[0], placed(device, weights), Router(*router[1:], scale), Epilogue(*(placed(device, one) for one in added))
    for row in ROWS:
        for token in range(x.shape[0]):
            kernel = slot_kernels(device, DOWN_WARPS, 1, row, token, early=early)["down_slots"]
            down_shape = shape._replace(width=inner, warps=DOWN_WARPS)
            kernel(hiddens, *given, down, own_down, results, experts.count, hidden, down_shape)
    assert results is not None
    out.copy_(device.get(results, out))


def seen(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[..., 16 * row : 16 * row + 16] for row in ROWS], -1)


@pytest.fixture
def experts() -> Experts:
    torch.manual_seed(3)
    return layer(5, 256, 256, lanes=1)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 256).bfloat16()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_given_experts_are_summed(experts: Experts, x: torch.Tensor):
    ids, weights = torch.tensor([[4, 1, 0], [2, 2, 3]]).int(), torch.rand(2, 3)
    out = torch.zeros(2, 256, dtype=torch.bfloat16)
    run(x, ids, weights, None, None, 1.0, (None,) * 3, experts, 3, {**GIVEN, "RENORMALIZE": False}, out)
    assert relative_rms(seen(out).float(), seen(expert_mlp.reference(x.float(), ids, weights, experts))) <= TOL


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_parts_of_skipped_experts_are_unchanged(experts: Experts, x: torch.Tensor):
    ids, parts = torch.tensor([[4, -1], [5, 3]]).int(), torch.full((2, 2, 256), 7.0)
    run(x, ids, None, None, None, 1.0, (None,) * 3, experts, 2, {**GIVEN, "RENORMALIZE": False}, parts)
    expected = torch.full_like(parts, 7.0)
    expert_parts.reference(x, torch.where(ids == 5, -1, ids), experts, expected)
    assert relative_rms(seen(parts), seen(expected)) <= TOL
    assert (parts[0, 1] == 7).all()
    assert (parts[1, 0] == 7).all()


RULES = [("softmax", True), ("sigmoid", False), ("chosen", True)]
OTHERS = [pytest.param(scoring, not renormalize, marks=pytest.mark.slow) for scoring, renormalize in RULES]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("scoring", "renormalize"), [*RULES, *OTHERS])
def test_experts_are_selected_by_their_scores(experts: Experts, x: torch.Tensor, scoring: str, renormalize: bool):
    # ties, zeros of both signs, an excluded expert
    scores = torch.tensor([[0.5, -0.0, 0.5, 0.0, -3.0], [-torch.inf, -1.0, 2.0, -1.0, 4.0]]).bfloat16()
    routing, bias = Routing(3, scoring, renormalize, scale=1.5), torch.linspace(0, 0.4, 5) if scoring == "sigmoid" else None
    residual, shared, gate = torch.randn(2, 256).bfloat16(), torch.randn(2, 256).bfloat16(), torch.randn(2).bfloat16()
    out, rule = torch.zeros(2, 256, dtype=torch.bfloat16), {"E": 32, "SCORING": scoring, "RENORMALIZE": renormalize}
    run(x, None, None, scores, bias, 1.5, (residual, shared, gate), experts, 3, rule, out)
    ids, weights = route.reference(scores, routing, bias)
    moe = expert_mlp.reference(x.float(), ids, weights, experts)
    expected = combine.reference(residual.float(), moe, shared.float(), gate.float())
    assert relative_rms(seen(out).float(), seen(expected)) <= TOL
    assert np.isfinite(out.float().numpy()).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("early", [True, False], ids=["TMA", "cp.async"])
def test_a_shared_expert_is_one_more_slot(experts: Experts, x: torch.Tensor, early: bool):
    one, scores, gate = layer(1, 256, 256, lanes=1), torch.randn(2, 5).bfloat16(), torch.randn(2).bfloat16()
    shared, residual = SharedExpert(one.gate[0], one.up[0], one.down[0]), torch.randn(2, 256).bfloat16()
    out, rule = torch.zeros(2, 256, dtype=torch.bfloat16), {"E": 32, "SCORING": "softmax", "RENORMALIZE": True}
    run(x, None, None, scores, None, 1.0, (residual, None, gate), experts, 3, rule, out, shared, early)
    routing = Routing(3, "softmax", True)
    expected = mixture.reference(x.float(), scores, routing, experts, residual.float(), None, shared, gate.float())
    assert relative_rms(seen(out).float(), seen(expected)) <= TOL


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("inner", "own"), [(768, False), (512, True)])
def test_one_token_of_a_large_model(inner: int, own: bool):
    torch.manual_seed(5)
    experts, one = layer(9, 2048, inner, lanes=1), layer(1, 2048, inner, lanes=1)
    x, scores, residual = torch.randn(1, 2048).bfloat16(), torch.randn(1, 9).bfloat16(), torch.randn(1, 2048).bfloat16()
    shared, gate = (SharedExpert(one.gate[0], one.up[0], one.down[0]), torch.randn(1).bfloat16()) if own else (None, None)
    out, rule = torch.zeros(1, 2048, dtype=torch.bfloat16), {"E": 32, "SCORING": "softmax", "RENORMALIZE": True}
    run(x, None, None, scores, None, 1.0, (residual, None, gate), experts, 8, rule, out, shared)
    wide = None if gate is None else gate.float()
    expected = mixture.reference(x.float(), scores, Routing(8, "softmax", True), experts, residual.float(), None, shared, wide)
    assert relative_rms(seen(out).float(), seen(expected)) <= TOL
