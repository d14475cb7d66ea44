"""Expert kernels for hundreds of pairs on Hopper, on numpy: grouping into blocks, and their products."""

import pytest
import torch

from auraflux.ops._cases import relative_rms
from auraflux.ops.moe._expert_cases import layer
from auraflux.ops.moe.experts import Experts
from auraflux.ops.moe.reference import expert_parts, route
from auraflux.ops.moe.routing import Routing

pytest.importorskip("triton")
from auraflux.ops.moe.cuda.gemm.persistent import StreamShape, ring_sizes
from auraflux.ops.moe.cuda.matvec.few_tokens_launch import order_of
from auraflux.ops.moe.cuda.routing.assign import AssignShape
from tests.emulator.experts import block_kernels, passed, placed
from tests.emulator.ptx import Device
from tests.ops.moe import test_hopper as slots

CPU = torch.device("cpu")
TOL = 6e-3  # intermediate results are bf16
SKEW = 3


class Blocks:
    """Pairs grouped into blocks on a device, as `assign_pairs` writes them."""

    def __init__(
        self, ids: torch.Tensor, experts: int, octets: int, scores: torch.Tensor | None = None, bias=None, scoring: str = ""
    ):
        self.device, (tokens, k), self.octets, self.size = Device(), ids.shape, octets, 8 * octets
        self.pairs, self.most = tokens * k, min(tokens * k, tokens * k // self.size + experts)
        filled = [torch.full((count,), -7).int() for count in (self.size * self.most, 2 * self.most + 1, self.pairs)]
        self.chosen, self.placed, self.owner, spots = (placed(self.device, one) for one in (ids, *filled))
        given = placed(self.device, scores), placed(self.device, bias)
        padded = 0 if scores is None else -(-experts // 32) * 32
        shape = AssignShape(k, padded, scoring, False, -(-tokens // 32), self.size)
        kernel = block_kernels(self.device, 32, 1, 0)["assign_pairs"]
        kernel(*given, self.chosen, None, self.placed, self.owner, spots, 1.0, tokens, experts, self.most, shape)
        self.ids = self.device.get(self.chosen, ids)
        self.lists = [self.device.get(at, one) for at, one in zip((self.placed, self.owner, spots), filled, strict=True)]

    def check(self, experts: int) -> None:
        """Check that every pair is in a block of its expert, at its spot, and that only an expert's last block is not full."""
        pairs, (_, owners, spots) = self.lists[0].view(-1, self.size), self.lists
        count = int(owners[self.most])
        assert (owners[self.most + 1 :] == 0).all()
        assert (owners[count : self.most] == experts).all()
        flat = self.ids.flatten()
        for expert in range(experts):
            blocks = pairs[:count][owners[:count] == expert]
            there = blocks[blocks < self.pairs]
            assert sorted(there.tolist()) == (flat == expert).nonzero().flatten().tolist()
            assert len(blocks) == -(-len(there) // self.size)
            assert (pairs.flatten()[spots[there]] == there).all()


def parts_of(
    blocks: Blocks, x: torch.Tensor, experts: Experts, programs: int, ordered: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    device, inner, hidden, k = blocks.device, experts.inner, experts.hidden, blocks.ids.shape[1]

    between, parts = torch.full((blocks.pairs, inner), float("nan")).bfloat16(), torch.full((*blocks.ids.shape, hidden), 7.0)
    inputs, hiddens, results = (placed(device, one) for one in (x, between, parts))
    gate, up, down = (passed(device, stack) for stack in (experts.gate, experts.up, experts.down))
    lists = blocks.placed, blocks.owner
    for program in range(programs):
        kernels = block_kernels(device, 8, programs, program)
        shape = StreamShape(hidden, inner, ring_sizes(hidden, blocks.octets, CPU)[1], blocks.octets, ordered[0])
        kernels["up_stream"](inputs, *lists, gate, up, hiddens, blocks.pairs, k, blocks.most, shape)
    for program in range(programs):
        kernels = block_kernels(device, 8, programs, program)
        shape = StreamShape(hidden, inner, ring_sizes(inner, blocks.octets, CPU)[1], blocks.octets, ordered[1], SKEW)
        kernels["down_stream"](hiddens, *lists, down, results, blocks.pairs, blocks.most, shape)
    assert results is not None
    return device.get(results, parts)


@pytest.mark.parametrize(("tokens", "experts", "k", "octets"), [(5, 128, 8, 1), (40, 20, 3, 1), (128, 5, 2, 1), (100, 7, 3, 2)])
def test_pairs_are_grouped_into_blocks(tokens: int, experts: int, k: int, octets: int):
    torch.manual_seed(tokens)
    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)]).int()
    ids[0, 0], ids[1, 1] = -1, experts
    Blocks(ids, experts, octets).check(experts)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_experts_are_selected_by_scores(scoring: str):
    torch.manual_seed(2)
    scores, bias = torch.randn(33, 40), torch.randn(40) * 0.1 if scoring == "sigmoid" else None
    scores = scores if scoring == "sigmoid" else scores.bfloat16()
    blocks = Blocks(torch.full((33, 6), -9).int(), 40, 1, scores, bias, scoring)
    assert torch.equal(blocks.ids, route.reference(scores, Routing(6, scoring, True), bias)[0])
    blocks.check(40)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("experts", "hidden", "inner", "tokens", "k", "octets", "programs"),
    [
        (4, 256, 256, 3, 2, 1, 3),
        # experts of several blocks, programs of several experts
        (3, 512, 256, 14, 2, 1, 2),
        (2, 256, 256, 20, 2, 2, 2),
        pytest.param(5, 512, 768, 12, 3, 1, 4, marks=pytest.mark.slow),
        pytest.param(3, 512, 768, 40, 2, 2, 4, marks=pytest.mark.slow),
        # more quads than warps
        pytest.param(2, 2560, 512, 5, 2, 1, 2, marks=pytest.mark.slow),
    ],
)
def test_blocks_stream_through_programs(experts: int, hidden: int, inner: int, tokens: int, k: int, octets: int, programs: int):
    torch.manual_seed(hidden)
    made, x = layer(experts, hidden, inner, lanes=1), torch.randn(tokens, hidden).bfloat16()
    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)]).int()
    ids[0, 0] = -1
    parts = parts_of(Blocks(ids, experts, octets), x, made, programs)
    expected = torch.full_like(parts, 7.0)
    expert_parts.reference(x, ids, made, expected)
    assert (parts[0, 0] == 7).all()
    assert relative_rms(parts[1:], expected[1:]) <= TOL


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("hidden", "inner", "tokens", "k"),
    [(512, 256, 3, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((256, 512, 2, 3), (2048, 768, 3, 8)))],
)
def test_ordered_blocks_equal_slots(hidden: int, inner: int, tokens: int, k: int):
    """Compare bit for bit, whether a warp has a complete slot or quads of several."""
    torch.manual_seed(inner)
    made, x = layer(k + 1, hidden, inner, lanes=1), torch.randn(tokens, hidden).bfloat16()
    ids = torch.stack([torch.randperm(k + 1)[:k] for _ in range(tokens)]).int()
    parts = parts_of(Blocks(ids, k + 1, 1), x, made, 2, order_of(made, k))
    expected = torch.zeros_like(parts)
    slots.run(x, ids, None, None, None, 1.0, (None,) * 3, made, k, {**slots.GIVEN, "RENORMALIZE": False}, expected)
    assert torch.equal(slots.seen(parts), slots.seen(expected))
