"""Products by tiles of tokens on Hopper, without one: tokens are in the order in which codes are unpacked; plans fit."""

import types
from itertools import product

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from auraflux.ops._cases import relative_rms
from auraflux.ops.linear.cuda.call import FusedNorm
from auraflux.ops.linear.cuda.gemm import wgmma
from auraflux.ops.linear.cuda.gemm import wgmma_launch as tiles
from auraflux.quant import quantize
from auraflux.quant.packing import unpack
from tests.emulator.gluon import STILL, Pointer, Program, Tensor
from tests.emulator.rebind import rebound


def run(kernel, *args, ids: tuple[int, ...] = (0, 0, 0)):
    """Call a kernel's Python with numpy in place of the language."""
    language = Program(ids)
    language.sum, language.sqrt = (lambda x, axis: Tensor(x.data.sum(axis))), (lambda x: Tensor(np.sqrt(x.data)))
    return rebound(kernel, language, **STILL)(*args)


@pytest.mark.parametrize(("bits", "block"), [(4, 256), (4, 128), (8, 128)])
def test_tokens_are_in_the_order_of_codes(bits: int, block: int):
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(-(2**31), 2**31, (16, block * bits // 32), dtype=torch.int32, generator=generator)
    codes = unpack(packed, bits).numpy()
    inputs, ordered = np.arange(block, dtype=np.float32), np.full(block, -1, np.float32)
    run(tiles.order_tokens, Pointer(inputs), Pointer(ordered), 1, block, block, bits, 1, block, block)
    words = run(wgmma.words_of, Tensor(packed.numpy()), block)
    for n, some in enumerate(words):
        for j in range(4):
            plane = j * 4 // bits
            found = run(wgmma._aligned_with_codes, some, j, None).data >> (bits * plane + 16 * (np.arange(16) % 2))
            places = ordered[n * 64 + j * 16 :][:16].astype(int)
            assert ((found & ((1 << bits) - 1)) == codes[:, places]).all()
    assert (np.sort(ordered) == inputs).all()


def test_a_stream_is_normalised_and_ordered():
    tokens, width, padded, tile, eps = 3, 320, 512, 4, 1e-5
    generator = np.random.default_rng(0)
    x, delta = (generator.standard_normal((tokens, width), np.float32) for _ in range(2))
    norm, total = generator.random(width, np.float32) + 0.5, np.full((tokens, width), np.nan, np.float32)
    ordered, plain = (np.full(tile * padded, np.nan, np.float32) for _ in range(2))
    both = x + delta
    unit = both / np.sqrt((both**2).mean(1, keepdims=True) + eps) * norm
    for token in range(tile):
        stream, *normed = (Pointer(part.reshape(-1)) for part in (x, delta, norm, total))
        sizes = tokens, width, padded
        run(tiles.order_normed, stream, FusedNorm(*normed, eps), Pointer(ordered), *sizes, 4, tile, 256, 512, ids=(token, 0, 0))
        run(tiles.order_tokens, Pointer(unit.reshape(-1)), Pointer(plain), *sizes, 4, tile, 256, 512, ids=(token, 0, 0))
    assert np.allclose(ordered, plain, rtol=1e-5, atol=1e-6)
    assert (total == both).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tokens", [2, 17, 33, 65, 129, 1000])
@pytest.mark.parametrize(("rows", "width"), [(1, 32), (8192, 8192), (256000, 4096), (64, 65536)])
def test_plans_fit(bits: int, tokens: int, rows: int, width: int):
    found = tiles.plan(tokens, (rows,), width, bits, 132)
    assert found.stages >= 3
    assert found.stages * (found.rows * found.block * bits // 8 + found.block * found.tile * 2) <= tiles.STAGES_NBYTES
    # more sums than these do not fit into registers
    assert found.rows * found.tile <= 128 * 256
    assert 1 <= found.shares <= max(1, -(-width // found.block))


def test_plans_fill_the_gpu():
    assert tiles.plan(64, (8192,), 8192, 4, 132) == tiles.Plan(64, 128, 256, 4, 2)
    # gate and up: one round of high programs, not two of low ones
    assert tiles.plan(64, (14336, 14336), 4096, 4, 132) == tiles.Plan(64, 256, 256, 3, 1)
    assert tiles.plan(1024, (14336, 14336), 4096, 4, 132) == tiles.Plan(256, 128, 128, 3, 1)


def every_plan() -> list[tuple[tiles.Plan, int]]:
    found = []
    for bits, (tile, rows), shares in product((4, 8), tiles.STEP_US, (1, 3)):
        block = 256 if tile <= 64 and bits == 4 else 128
        stages = min(6, tiles.STAGES_NBYTES // (rows * block * bits // 8 + block * tile * 2))
        if bits == 4 or rows == 128:
            found.append((tiles.Plan(tile, rows, block, stages, shares), bits))
    return [(plan, bits) for plan, bits in found if plan.stages >= 3]


@pytest.mark.parametrize(("rows", "tiles"), [(5, 1), (3, 8), (7, 19)])
def test_programs_in_a_row_share_rows_and_leave_no_tile_out(rows: int, tiles: int):
    language = types.SimpleNamespace(num_programs=lambda axis: (rows, 1, tiles)[axis], minimum=min)
    neighbours = types.FunctionType(wgmma._neighbours.fn.__code__, {"gl": language})
    found = [neighbours(at, tile, 8) for tile in range(tiles) for at in range(rows)]
    assert sorted(found) == sorted(product(range(rows), range(tiles)))
    together = min(8, tiles)
    assert found[:together] == [(0, tile) for tile in range(together)]


@pytest.mark.gpu
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("plan", "bits"), every_plan())
def test_plans_on_the_gpu(plan: tiles.Plan, bits: int, group: int):
    x = torch.randn(300, 1152).bfloat16().cuda()
    weights = [quantize(torch.randn(rows, 1152).bfloat16().cuda(), bits, group, "affine") for rows in (333, 333, 65)]
    products = [x.float() @ weight.dequantize(torch.float32).T for weight in weights]
    outs = [x.new_full((300, weight.shape[0]), float("nan")) for weight in weights]
    tiles.launch_tiles(x, weights, outs, False, plan)
    for out, wanted in zip(outs, products, strict=True):
        assert relative_rms(out.float(), wanted) < 4e-3
    tiles.launch_tiles(x, weights[:2], outs[:1], True, plan)
    assert relative_rms(outs[0].float(), torch.nn.functional.silu(products[0]) * products[1]) < 1e-2
