"""Several tokens times four-bit weights, bit-identical to one token: the order of inputs, on numpy; plans."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from auraflux.ops.linear.cuda.call import NO_NORM
from auraflux.ops.linear.cuda.gemm import int4_invariant as gemm
from auraflux.ops.linear.cuda.gemm import wgmma_launch as tiles
from auraflux.quant import quantize
from tests.emulator.gluon import Pointer
from tests.emulator.ptx import Device, Machine
from tests.ops.linear.test_tiles import run


@pytest.mark.parametrize(("width", "warps", "tile"), [(256, 2, 8), (768, 2, 8), (4096, 4, 8), (2560, 2, 16)])
def test_tokens_are_in_the_order_of_codes(width: int, warps: int, tile: int):
    """The order is that of `order_tokens` for any format, which other tests check against codes."""
    tokens = 3
    x = torch.arange(tokens * width, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    device = Device()
    args = (
        device.put(x.view(tokens, width)),
        NO_NORM,
        gemm.Tokens(device.put(torch.zeros(tile, 2 * width, dtype=torch.int8)), None),
    )
    for token in range(tokens):
        Machine(device, warps, token).program(gemm.order_tokens)(*args, width, warps, tile)
    found = device.get(args[2].x, torch.zeros(tile, width).bfloat16()).view(torch.int16).view(width // 64, tile, 64)
    wanted = np.zeros(tile * width, np.float32)
    for token in range(tile):
        given = Pointer(np.arange(tokens * width, dtype=np.float32)), Pointer(wanted)
        run(tiles.order_tokens, *given, tokens, width, width, 4, tile, 256, 4096, ids=(token, 0, 0))
    wanted = wanted.astype(np.int32).astype(np.int16).reshape(width // 64, tile, 64)
    assert (found.numpy()[:, :tokens] == wanted[:, :tokens]).all()


@pytest.mark.parametrize(
    ("rows", "width"), [((14336, 14336), 4096), ((4096, 1024, 1024), 4096), ((4096,), 14336), ((16,), 256)]
)
def test_shares_do_not_depend_on_the_number_of_tokens(rows: tuple[int, ...], width: int):
    share = gemm.share_for(rows, width, 132)
    assert 0 < share <= width // gemm.BLOCK
    for tokens in (2, 8, 9, 32, 33, 1000):
        tile, high, stages, split = gemm.choose_tile(tokens, rows, width, 132)
        assert stages >= 2
        assert stages * (high * gemm.BLOCK // 2 + gemm.BLOCK * tile * 2) <= gemm.STAGES_NBYTES
        assert not split or share < width // gemm.BLOCK


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 9, 17, 33, 64, 100])
@pytest.mark.parametrize(
    ("width", "rows"),
    [(4096, (512,)), (4096, (8960, 9008)), (768, (48, 16, 16, 32)), (2304, (128 * 140,)), (14336, (4096,)), (8192, (1024,))],
)
def test_a_token_is_what_it_is_alone(tokens: int, width: int, rows: tuple[int, ...]):
    x = torch.randn(tokens, width).bfloat16().cuda()
    weights = [quantize(torch.randn(each, width).bfloat16().cuda(), 4, 64) for each in rows]
    for mine, gated in ((weights, False), ([weights[0], weights[0]], True)):
        shapes = [(tokens, weight.shape[0]) for weight in (mine[:1] if gated else mine)]
        together, alone = ([torch.full(shape, float("nan")).bfloat16().cuda() for shape in shapes] for _ in range(2))
        gemm.multiply(x, mine, together, gated)
        for i in range(tokens):
            gemm.multiply(x[i : i + 1], mine, [out[i : i + 1] for out in alone], gated)
        assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
