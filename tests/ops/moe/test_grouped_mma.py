"""Thousands of pairs by `mma.sync`, on numpy: tiles of rows, blocks with few and many pairs."""

import pytest
import torch

pytest.importorskip("triton")

from auraflux.ops._cases import relative_rms
from auraflux.ops.moe._expert_cases import layer
from auraflux.ops.moe.cuda.gemm.grouped_mma import PAIRS, ROWS, WARPS, GroupedShape, expert_blocks
from auraflux.ops.moe.reference import expert_parts
from tests.emulator.experts import SlotMachine, passed, placed
from tests.emulator.ptx import Device

BF16 = torch.bfloat16
TOL = 6e-3  # weights and hidden values are bf16


def blocks_of(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pairs by blocks of one expert, as `grouped` does, and one block more than needed."""
    pairs, owner, count = [], [], ids.numel()
    for expert in range(experts):
        own = (ids.view(-1) == expert).nonzero()[:, 0].tolist()
        for first in range(0, len(own), PAIRS):
            some = own[first : first + PAIRS]
            pairs += some + [count] * (PAIRS - len(some))
            owner.append(expert)
    return torch.tensor([*pairs, *[count] * PAIRS]).int(), torch.tensor([*owner, experts]).int()


@pytest.mark.parametrize(("stages", "dtype"), [(2, torch.float32), (3, BF16)])
def test_blocks_of_an_expert(stages: int, dtype: torch.dtype):
    """Blocks of 40, 70, 128 and 5 pairs, and one that is not used; a skipped pair is left unchanged."""
    torch.manual_seed(1)
    k, inner, hidden, device = 3, 256, 512, Device()
    experts, x = layer(3, hidden, inner, lanes=1), torch.randn(81, hidden).to(BF16)
    ids = torch.tensor([0] * 40 + [1] * 70 + [2] * 133)[torch.randperm(243)].view(81, k).int()
    ids[4, 2] = -1
    placing, owner = blocks_of(ids, experts.count)
    parts = torch.full((81, k, hidden), 7.0, dtype=dtype)
    between = torch.full((243, inner), float("nan"), dtype=BF16)
    source, middle, out = (placed(device, each) for each in (x, between, parts))
    lists = placed(device, placing), placed(device, owner)
    gate, up, down = (passed(device, each) for each in (experts.gate, experts.up, experts.down))
    for inputs, weights, to, shape in (
        (source, (gate, up), middle, GroupedShape(hidden, inner, k, stages)),
        (middle, (down,), out, GroupedShape(inner, hidden, 1, stages)),
    ):
        for tile in range(shape.rows * len(weights) // ROWS):
            for block in range(len(owner)):
                machine = SlotMachine(device, WARPS, 1, tile, block)
                machine.program(expert_blocks)(inputs, lists, weights, to, experts.count, 243, shape)
    expected = torch.full((81, k, hidden), 7.0)
    expert_parts.reference(x.float(), ids, experts, expected)
    assert relative_rms(device.get(out, parts).float(), expected) <= TOL
