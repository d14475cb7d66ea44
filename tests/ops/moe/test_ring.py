"""Expert kernels for single tokens and large experts on Hopper: on numpy, and on the GPU in real sizes."""

import pytest
import torch

from auraflux.ops._cases import relative_rms
from auraflux.ops._gpu_inputs import experts as random_experts
from auraflux.ops.moe._expert_cases import layer
from auraflux.ops.moe.cuda.matvec.tma import RingShape
from auraflux.ops.moe.cuda.stacks import Epilogue
from auraflux.ops.moe.experts import Experts, SharedExpert
from auraflux.ops.moe.reference import mixture, mixture_by_steps
from auraflux.ops.moe.routing import Routing
from tests.emulator.experts import passed, placed, ring_kernels
from tests.emulator.ptx import Device

TOL = 8e-3  # intermediate results and the result are bf16
GROUPED = Routing(4, "sigmoid", True, groups=3, topk_groups=2, scale=2.5)


def one_of(experts: Experts) -> SharedExpert:
    return SharedExpert(experts.gate[0], experts.up[0], experts.down[0])


def run(x, scores, routing: Routing, experts: Experts, h, bias, shared, gate, sizes: dict[str, int]) -> torch.Tensor:
    """Run all programs of both kernels, with the given sizes."""
    device, inner, hidden, tokens = Device(), experts.inner, experts.hidden, len(x)
    own = shared if isinstance(shared, SharedExpert) else None
    slots = routing.k + (own is not None)

    between, out = (torch.full(shape, float("nan")).bfloat16() for shape in ((tokens, slots, inner), (tokens, hidden)))
    inputs, hiddens, results, given, more = (placed(device, one) for one in (x, between, out, scores, bias))
    added = Epilogue(*(placed(device, one) for one in (h, None if own else shared, gate)))
    owns = (None,) * 3 if own is None else (own.gate, own.up, own.down)
    first, second, last = (passed(device, stack) for stack in (experts.gate, experts.up, experts.down))
    own_gate, own_up, own_down = (passed(device, weight) for weight in owns)
    topk_groups = routing.topk_groups if routing.groups > 1 else 0
    rule = routing.k, -(-experts.count // 32) * 32, routing.scoring, routing.renormalize, topk_groups
    programs, warps, deep = sizes["up"], sizes["up_warps"], sizes["up_deep"]
    for token in range(tokens):
        for program in range(programs):
            kernel = ring_kernels(device, warps, programs, program, token)["up_ring"]
            count = -(-slots * inner // 8 // programs)
            up = hiddens, experts.count, inner, RingShape(hidden, *rule, count, deep, warps)
            kernel(inputs, given, more, first, second, own_gate, own_up, *up)
    programs, warps, deep = sizes["down"], sizes["down_warps"], sizes["down_deep"]
    for token in range(tokens):
        for program in range(programs):
            kernel = ring_kernels(device, warps, programs, program, token)["down_ring"]
            count = -(-hidden // 8 // programs)
            down = results, experts.count, hidden, RingShape(inner, *rule, count, deep, warps)
            kernel(hiddens, given, more, routing.scale, added, last, own_down, *down)
    assert results is not None
    return device.get(results, out)


def sizes(up: tuple[int, int, int], down: tuple[int, int, int]) -> dict[str, int]:
    names = "up", "up_warps", "up_deep", "down", "down_warps", "down_deep"
    return dict(zip(names, (*up, *down), strict=True))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("experts", "hidden", "inner", "routing", "own", "tokens", "shape"),
    [
        (96, 256, 512, GROUPED, True, 1, sizes((11, 2, 2), (3, 8, 9))),
        # more inputs than the warps of a program hold at a time, a shared expert's output
        pytest.param(33, 768, 512, Routing(3, "softmax", True), False, 1, sizes((5, 1, 3), (3, 8, 12)), marks=pytest.mark.slow),
        (33, 256, 512, Routing(1, "softmax", False), False, 2, sizes((7, 2, 2), (3, 8, 10))),
        # teams of three warps
        pytest.param(36, 256, 1536, Routing(2, "chosen", True), True, 1, sizes((13, 2, 2), (3, 8, 5)), marks=pytest.mark.slow),
    ],
)
def test_stages_go_through_rings(experts: int, hidden: int, inner: int, routing: Routing, own: bool, tokens: int, shape):
    torch.manual_seed(hidden)
    made, (x, h, shared_output) = layer(experts, hidden, inner, lanes=1), torch.randn(3, tokens, hidden).bfloat16()
    scores, gate = torch.randn(tokens, experts) * 2, torch.randn(tokens).bfloat16()
    bias = torch.randn(experts) * 0.1 if routing.scoring == "sigmoid" else None
    shared = one_of(layer(1, hidden, inner, lanes=1)) if own else shared_output
    found = run(x, scores, routing, made, h, bias, shared, gate, shape)
    wide = shared if own else shared_output.float()
    expected = mixture.reference(x.float(), scores, routing, made, h.float(), bias, wide, gate.float())
    assert relative_rms(found.float() - h.float(), expected - h.float()) <= TOL


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize(
    ("experts", "hidden", "inner", "routing", "own"),
    [
        (256, 7168, 2048, Routing(8, "sigmoid", True, groups=8, topk_groups=4, scale=2.5), True),
        (384, 7168, 2048, Routing(8, "sigmoid", True, scale=2.5), True),
        (128, 4096, 1536, Routing(8, "softmax", True), False),
        (160, 5120, 1536, Routing(8, "sigmoid", True, scale=2.5), True),
        (100, 6144, 1024, Routing(6, "softmax", False), False),
        (32, 3072, 4096, Routing(2, "chosen", True), True),
    ],
)
def test_large_experts_on_the_gpu(experts: int, hidden: int, inner: int, routing: Routing, own: bool, tokens: int):
    from auraflux.ops.moe.cuda.call import MixtureCall
    from auraflux.ops.moe.cuda.matvec.tma_launch import LEAST_WEIGHTS, mix
    from auraflux.ops.moe.cuda.routes import MIXTURES

    torch.manual_seed(tokens)
    with torch.device("cuda"):
        made, (x, h, shared_output) = random_experts(experts, hidden, inner), torch.randn(3, tokens, hidden).bfloat16()
        shared = one_of(random_experts(1, hidden, inner)) if own else shared_output
        gate, bias = torch.randn(tokens).bfloat16(), torch.randn(experts) * 0.1 if routing.scoring == "sigmoid" else None
        taken = MIXTURES.explain(MixtureCall(x, torch.empty(tokens, experts), routing, made, h, bias, shared, gate)).taken
        assert (taken == "matvec_tma") == (hidden * inner >= LEAST_WEIGHTS)
        for _ in range(3):
            scores = torch.randn(tokens, experts) * 2
            # ties go to the first expert
            scores[:, ::2] = scores[:, 1::2]
            found = mix(x, scores, routing, bias, made, h, shared, gate).float()
            expected = mixture_by_steps(x, scores, routing, made, h, bias, shared, gate).float()
            assert relative_rms(found - h.float(), expected - h.float()) <= 2 * TOL
            assert torch.equal(found, mix(x, scores, routing, bias, made, h, shared, gate).float())
