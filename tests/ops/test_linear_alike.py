"""Tokens beside each other times four-bit weights, as one token is multiplied: the order of inputs, on numpy; plans."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from auraflux.ops.linear.cuda import gemm_int4_alike as alike
from auraflux.ops.linear.cuda import gemm_wgmma_launch as tiles
from auraflux.ops.linear.cuda.call import PLAIN
from auraflux.quant import quantize
from tests.emulator.gluon import Pointer
from tests.emulator.ptx import Device, Machine
from tests.ops.test_linear_tiles import run


@pytest.mark.parametrize(("width", "warps", "tile"), [(256, 2, 8), (768, 2, 8), (4096, 4, 8), (2560, 2, 16)])
def test_tokens_are_in_the_order_of_codes(width: int, warps: int, tile: int):
    """As `order_tokens` of any formats has them, which is held to what codes meet."""
    tokens = 3
    x = torch.arange(tokens * width, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    device = Device()
    args = (
        device.put(x.view(tokens, width)),
        PLAIN,
        alike.Tokens(device.put(torch.zeros(tile, 2 * width, dtype=torch.int8)), None),
    )
    for token in range(tokens):
        Machine(device, warps, token).program(alike.order_tokens)(*args, width, warps, tile)
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
    share = alike.share_for(rows, width, 132)
    assert 0 < share <= width // alike.BLOCK
    for tokens in (2, 8, 9, 32, 33, 1000):
        tile, high, stages, split = alike.plan_for(tokens, rows, width, 132)
        assert stages >= 2
        assert stages * (high * alike.BLOCK // 2 + alike.BLOCK * tile * 2) <= alike.STAGES_NBYTES
        assert not split or share < width // alike.BLOCK


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
        alike.multiply(x, mine, together, gated)
        for i in range(tokens):
            alike.multiply(x[i : i + 1], mine, [out[i : i + 1] for out in alone], gated)
        assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
