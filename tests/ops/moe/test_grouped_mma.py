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
DOWN_TILES = (0, 3)  # of the result, in tiles of 128 rows


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


@pytest.mark.parametrize(
    ("stages", "dtype", "counts"), [(2, torch.float32, (5, 133)), (2, BF16, (70,)), (3, BF16, (40,))], ids=str
)
def test_blocks_of_an_expert(stages: int, dtype: torch.dtype, counts: tuple[int, ...]):
    """Blocks of few and many pairs, the next block of an expert, one that is not used, and a pair that is skipped."""
    torch.manual_seed(1)
    tokens, k, inner, hidden, device = sum(counts) + 1, 2, 256, 512, Device()
    experts, x = layer(len(counts), hidden, inner, lanes=1), torch.randn(tokens, hidden).to(BF16)
    ids = torch.full((tokens, k), -1).int()
    ids[torch.randperm(tokens)[1:], 1] = torch.tensor([e for e, count in enumerate(counts) for _ in range(count)]).int()
    placing, owner = blocks_of(ids, experts.count)
    parts = torch.full((tokens, k, hidden), 7.0, dtype=dtype)
    between = torch.full((tokens * k, inner), float("nan"), dtype=BF16)
    source, middle, out = (placed(device, each) for each in (x, between, parts))
    lists = placed(device, placing), placed(device, owner)
    gate, up, down = (passed(device, each) for each in (experts.gate, experts.up, experts.down))
    for inputs, weights, to, tiles, shape in (
        (source, (gate, up), middle, range(inner // 64), GroupedShape(hidden, inner, k, stages)),
        (middle, (down,), out, DOWN_TILES, GroupedShape(inner, hidden, 1, stages)),
    ):
        for tile in tiles:
            for block in range(len(owner)):
                machine = SlotMachine(device, WARPS, 1, tile, block)
                machine.program(expert_blocks)(inputs, lists, weights, to, experts.count, tokens * k, shape)
    expected = torch.full((tokens, k, hidden), 7.0)
    expert_parts.reference(x.float(), ids, experts, expected)
    assert relative_rms(seen(device.get(out, parts)).float(), seen(expected)) <= TOL


def seen(parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([parts[..., ROWS * tile : ROWS * tile + ROWS] for tile in DOWN_TILES], -1)
