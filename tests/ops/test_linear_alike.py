"""Tokens beside each other times four-bit weights, as one token is multiplied: orders of inputs and of sums, on numpy."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from auraflux.ops.linear.cuda import gemm_int4_alike as alike
from auraflux.ops.linear.cuda import gemm_int4_alike_tiles as tiles
from auraflux.ops.linear.cuda import matvec_int4
from auraflux.quant import quantize
from auraflux.quant.packing import unpack
from tests.emulator.rebind import rebound
from tests.ops.test_linear_tiles import Shaped, run


@pytest.mark.parametrize("pairs", [1, 2])
def test_codes_meet_their_inputs(pairs: int):
    """What is said of the tensor cores' operands: the input at place k of a step is that of the k-th code."""
    width, k = 128 * pairs, np.arange(16)
    packed = torch.randint(-(2**31), 2**31, (16, width // 8), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    codes = unpack(packed, 4).numpy()
    # of each word of a lane (8 k apart) inputs j and j + 4, as `load_x` pairs them
    lane, word, second = k // 2 % 4, k // 8, k % 2
    for n, words in enumerate(run(tiles._split_groups, Shaped(packed.numpy()), pairs)):
        found = np.repeat(words.data.transpose(0, 2, 1)[..., None], 2, -1).reshape(16, 16)
        for j in range(4):
            inputs = n * 64 + lane * 16 + word * 8 + j + 4 * second
            assert ((found >> (4 * j + 16 * second) & 15) == codes[:, inputs]).all()


def test_sums_are_told_apart_by_groups():
    sums = np.arange(32, dtype=np.float32).reshape(4, 8)
    for pairs in (1, 2):
        parts = run(tiles._split_sums, Shaped(sums[: 2 * pairs]), pairs, None)
        assert [part.data.tolist() for part in parts] == sums[: 2 * pairs].tolist()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("width", "warps", "pairs"), [(4096, 4, 2), (4096, 4, 1), (768, 4, 2), (14336, 16, 1), (256, 4, 1)])
def test_pairs_of_groups_come_in_the_order_of_one_token(width: int, warps: int, pairs: int, split: bool):
    """Warp by warp, lane by lane or two of them at a time, run by run; those past the end are left out."""
    block = rebound(tiles._block_of, SimpleNamespace(static_range=range))
    runs, each = tiles.runs_of(width, warps), 4 // pairs
    found = []
    for v in range(warps):
        for n in range(each * runs):
            found.append(block(n if split else n + v * each * runs, v, width, warps, pairs, split))
    wanted = [(v + i * warps) * each + q for v in range(warps) for q in range(each) for i in range(runs)]
    assert found == wanted
    assert sorted(at for at in found if at < width // (128 * pairs)) == list(range(width // (128 * pairs)))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 9, 17, 33, 64, 100])
@pytest.mark.parametrize(
    ("width", "rows"), [(4096, (512,)), (4096, (8960, 9008)), (768, (48, 16, 16, 32)), (2304, (128 * 140,))]
)
def test_a_token_is_what_it_is_alone(tokens: int, width: int, rows: tuple[int, ...]):
    x = torch.randn(tokens, width).bfloat16().cuda()
    weights = [quantize(torch.randn(each, width).bfloat16().cuda(), 4, 64) for each in rows]
    for mine, gated in ((weights, False), ([weights[0], weights[0]], True)):
        shapes = [(tokens, weight.shape[0]) for weight in (mine[:1] if gated else mine)]
        together, alone = ([torch.full(shape, float("nan")).bfloat16().cuda() for shape in shapes] for _ in range(2))
        alike.multiply(x, mine, together, gated)
        for i in range(tokens):
            matvec_int4.multiply(x[i : i + 1], mine, [out[i : i + 1] for out in alone], gated)
        assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
