"""Products of few tokens on Hopper, on numpy: each code is multiplied by its input and its scale."""

from itertools import zip_longest

import pytest
import torch

from auraflux.ops._cases import relative_rms
from auraflux.ops._gpu_inputs import codes
from auraflux.ops.linear.reference import linear
from auraflux.quant import QTensor, quantize

pytest.importorskip("triton")
from auraflux.ops.gpu.blocks.codes import Codes
from auraflux.ops.linear.cuda.gemm.bits_skinny import matmul_codes
from auraflux.ops.linear.cuda.gemm.int4_tiles import TILES, Tile, Weight, matmul_tiles
from auraflux.ops.linear.cuda.gemm.int4_tiles import multiply as multiply_tiles
from auraflux.ops.linear.cuda.matvec.bits import matvec_codes
from auraflux.ops.linear.cuda.matvec.int8 import matvec_bytes
from auraflux.ops.linear.cuda.row_copies import Product, in_bytes
from tests.emulator.ptx import Device, Machine

TOL = 4e-3
# bits, group (0: MXFP4), width, parts of a run: whole runs and not, scales in whole words and not
FORMATS = [
    (2, 64, 704, 1), (2, 128, 1152, 1), (3, 64, 640, 1), (4, 64, 1024, 2), (4, 64, 1088, 2), (4, 32, 544, 1), (4, 128, 1152, 2),
    (4, 0, 544, 1), (4, 0, 352, 1), (5, 64, 640, 2), (5, 64, 640, 1), (6, 64, 320, 2), (8, 64, 576, 4), (8, 32, 544, 2),
]  # fmt: skip


def weight_of(rows: int, width: int, bits: int, group: int):
    return quantize(torch.randn(rows, width).bfloat16(), bits, group or 32, "affine" if group else "mxfp4")


def put(device: Device, weight) -> Codes:
    return Codes(*(device.put(part) for part in in_bytes(weight)))


def nothing(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=torch.bfloat16)


def multiply(
    x: torch.Tensor, weights: list, bias: torch.Tensor | None, gated: bool, blocks: int, parts: int, in_bytes: bool = False
) -> list:
    """Run every program of `matvec_codes` or `matvec_bytes` over one or two weights of as many rows."""
    device, (rows, width) = Device(), weights[0].shape
    outs = [device.put(nothing(1, rows)) for _ in range(1 if gated else len(weights))]
    codes, more = [put(device, weight) for weight in weights], device.put(bias)
    products = tuple(Product(each, out, more) for each, out in zip_longest(codes, outs))
    programs = len(weights) * rows // (16 * blocks)
    args = device.put(x), products, () if len(outs) == 1 else (programs // 2,)
    sizes = gated, width, weights[0].bits, weights[0].group, blocks, parts
    for program in range(programs):
        if in_bytes:
            Machine(device, 2 * blocks, program).program(matvec_bytes)(*args, *sizes, 2 * blocks, 3, 2, blocks > 1, 0)
        else:
            Machine(device, 2, program).program(matvec_codes)(*args, *sizes, 2, 3, 2)
    return [device.get(out, nothing(1, rows)).float() for out in outs]


def product(x: torch.Tensor, weight) -> torch.Tensor:
    return x.float() @ weight.dequantize(torch.float32).T


@pytest.mark.parametrize(("bits", "group", "width", "parts"), FORMATS)
def test_one_token(bits: int, group: int, width: int, parts: int):
    torch.manual_seed(0)
    weight, x = weight_of(16, width, bits, group), torch.randn(1, width).bfloat16()
    (found,) = multiply(x, [weight], None, False, 1, parts)
    assert relative_rms(found, product(x, weight)) < TOL


@pytest.mark.parametrize(("bits", "group", "width", "parts"), [form for form in FORMATS if form[1]])
def test_one_token_in_bytes(bits: int, group: int, width: int, parts: int):
    torch.manual_seed(0)
    weight, x = weight_of(32, width, bits, group), torch.randn(1, width).bfloat16()
    (found,) = multiply(x, [weight], None, False, 2, parts, True)
    assert relative_rms(found, product(x, weight)) < TOL


def test_bytes_of_inputs_far_out():
    """Inputs that are large, zero in a whole group, tiny, larger than their neighbours, or not finite."""
    torch.manual_seed(0)
    weight, x = weight_of(32, 512, 2, 64), torch.randn(1, 512)
    x[:, :64], x[:, 64:128], x[:, 128:192], x[:, 200] = x[:, :64] * 1e30, 0, x[:, 128:192] * 1e-36, 1000
    (found,) = multiply(x.bfloat16(), [weight], None, False, 2, 1, True)
    assert relative_rms(found, product(x.bfloat16(), weight)) < TOL
    x[:, :64] = 0
    (found,) = multiply(x.bfloat16(), [weight], None, False, 2, 1, True)
    assert relative_rms(found, product(x.bfloat16(), weight)) < TOL
    x[:, 300] = float("nan")
    (found,) = multiply(x.bfloat16(), [weight], None, False, 2, 1, True)
    assert found.isnan().all()


@pytest.mark.parametrize("in_bytes", [False, True])
def test_one_token_times_several_weights(in_bytes: bool):
    torch.manual_seed(0)
    weights, x, bias = [weight_of(64, 576, 8, 64) for _ in range(2)], torch.randn(1, 576).bfloat16(), torch.randn(64)
    for found, weight in zip(multiply(x, weights, bias, False, 2, 4, in_bytes), weights, strict=True):
        assert relative_rms(found, product(x, weight) + bias) < TOL


@pytest.mark.parametrize("in_bytes", [False, True])
def test_one_token_gated(in_bytes: bool):
    torch.manual_seed(0)
    weights, x = [weight_of(32, 640, 5, 64) for _ in range(2)], torch.randn(1, 640).bfloat16()
    gate, up = (product(x, weight) for weight in weights)
    (found,) = multiply(x, weights, None, True, 2, 1, in_bytes)
    assert relative_rms(found, torch.nn.functional.silu(gate) * up) < 1e-2


# bits, group (0: MXFP4), width, parts of eight columns, blocks of rows, tokens
SOME = [(8, 64, 576, 4, 1, 5), (4, 64, 1088, 2, 2, 13), (2, 64, 1024, 2, 1, 11), (6, 64, 640, 2, 1, 5), (5, 64, 640, 2, 1, 5),
        (3, 64, 640, 2, 1, 8), (4, 32, 544, 1, 1, 3), (4, 0, 544, 1, 1, 9), (4, 128, 1152, 2, 1, 3)]  # fmt: skip


@pytest.mark.parametrize(("bits", "group", "width", "parts", "blocks", "tokens"), SOME)
def test_some_tokens(bits: int, group: int, width: int, parts: int, blocks: int, tokens: int):
    torch.manual_seed(0)
    weight, x, device = weight_of(32 * blocks, width, bits, group), torch.randn(tokens, width).bfloat16(), Device()
    out, rows = device.put(nothing(tokens, 32 * blocks)), 32 * blocks
    args = (
        device.put(x),
        *put(device, weight),
        out,
        tokens,
        rows,
        width,
        bits,
        group or 32,
        parts,
        blocks,
        1 if tokens <= 8 else 2,
    )
    for program in range(2):
        Machine(device, 2, program).program(matmul_codes)(*args, 2, 1)
    assert relative_rms(device.get(out, nothing(tokens, rows)).float(), product(x, weight)) < TOL


@pytest.mark.parametrize(
    ("wide", "high", "tokens", "rows", "width", "stages"),
    [
        (16, 32, 21, 40, 1024, 3),
        (16, 64, 21, 136, 512, 2),
        (32, 64, 21, 72, 512, 3),
        (64, 64, 70, 72, 256, 2),
        (64, 128, 70, 72, 256, 2),
    ],
)
def test_many_tokens(wide: int, high: int, tokens: int, rows: int, width: int, stages: int):
    """Rows and tokens that do not fill their tiles; without wgmma."""
    assert Tile(wide, high) in TILES
    torch.manual_seed(0)
    weight, x, bias, device = weight_of(rows, width, 4, 64), torch.randn(tokens, width).bfloat16(), torch.randn(rows), Device()
    out, tile = device.put(nothing(tokens, rows)), Tile(wide, high)
    args = device.put(x), (put_weight(device, weight, 0),), (), device.put(bias), out, None, tokens, rows, width, tile, stages
    for program in range(-(-rows // high)):
        for some in range(-(-tokens // wide)):
            Machine(device, tile.warps, program, some, 0).program(matmul_tiles)(*args)
    assert relative_rms(device.get(out, nothing(tokens, rows)).float(), product(x, weight) + bias) < TOL


def put_weight(device: Device, weight: QTensor, before: int) -> Weight:
    parts = weight.packed.view(torch.int8), weight.scales, weight.biases
    return Weight(*(device.put(part) for part in parts), weight.shape[0], before)


def test_many_tokens_times_several_weights():
    torch.manual_seed(0)
    tokens, counts, tile, device = 21, (40, 32, 64), Tile(32, 64), Device()
    weights, x = [weight_of(count, 512, 4, 64) for count in counts], torch.randn(tokens, 512).bfloat16()
    out = device.put(nothing(tokens * sum(counts)))
    held = tuple(put_weight(device, weight, sum(counts[:n])) for n, weight in enumerate(weights))
    args = device.put(x), held, (1, 2), None, out, None, tokens, sum(counts), 512, tile, 2
    for program in range(3):
        Machine(device, tile.warps, program, 0, 0).program(matmul_tiles)(*args)
    found = device.get(out, nothing(tokens * sum(counts))).float().split([tokens * count for count in counts])
    for each, weight in zip(found, weights, strict=True):
        assert relative_rms(each.view(tokens, -1), product(x, weight)) < TOL


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [5, 17, 64, 70])
@pytest.mark.parametrize(("rows", "width"), [(136, 384), (1024, 8192), (8192, 4096)])
def test_many_tokens_on_the_gpu(tokens: int, rows: int, width: int):
    """One share of K and several."""
    torch.manual_seed(rows)
    with torch.device("cuda"):
        weight, x, bias = codes(rows, width, bits=4), torch.randn(tokens, width).bfloat16(), torch.randn(rows).bfloat16()
        for each in (None, bias):
            (out,) = multiply_tiles(x, [weight], each)
            assert relative_rms(out.float(), linear.reference(x.float(), weight, each)) < TOL
        for out in multiply_tiles(x, [weight, weight], None):
            assert relative_rms(out.float(), linear.reference(x.float(), weight)) < TOL
