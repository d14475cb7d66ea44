"""One token times 2 and 4 bits with few inputs in a group, on numpy: which bits meet which inputs, and sums their scales."""

from itertools import zip_longest

import pytest
import torch

from auraflux.ops._cases import relative_rms
from auraflux.quant import QTensor, affine, quantize

pytest.importorskip("triton")
from auraflux.ops.linear.cuda.matvec_units import matvec_tiles
from auraflux.ops.linear.cuda.row_copies import Product
from tests.emulator.ptx import Device, Machine
from tests.ops.test_linear_hopper import TOL, nothing, product, put

F16, F32 = torch.float16, torch.float32
# bits, group, kind, dtype of scales
FORMATS = [
    (4, 32, "iq4", F32), (2, 16, "affine", F32), (4, 32, "affine", F32), (4, 64, "affine", F32), (2, 128, "affine", F16),
    (4, 32, "affine", F16), (4, 128, "affine", F16),
]  # fmt: skip


def weight_of(rows: int, width: int, bits: int, group: int, kind: str, scales: torch.dtype) -> QTensor:
    numbers = torch.randn(rows, width).to(scales)
    if group == 16 and kind == "affine":
        return QTensor(*affine.encode(numbers, bits, group), bits, group, (rows, width))
    return quantize(numbers, bits, group, kind)


def multiply(x: torch.Tensor, weights: list[QTensor], added: torch.Tensor | None, gated: bool, blocks: int, warps: int) -> list:
    """Every program of `matvec_tiles` over one or two weights of as many rows."""
    device, (rows, width), first = Device(), weights[0].shape, weights[0]
    outs = [device.put(nothing(1, rows)) for _ in range(1 if gated else len(weights))]
    codes, more = [put(device, weight) for weight in weights], device.put(added)
    products = tuple(Product(each, out, more) for each, out in zip_longest(codes, outs))
    programs = len(weights) * rows // (16 * blocks)
    args = device.put(x), products, () if len(outs) == 1 else (programs // 2,)
    sizes = gated, width, first.bits, first.group, first.kind, first.scales.element_size(), blocks, warps
    for program in range(programs):
        Machine(device, warps, program).program(matvec_tiles)(*args, *sizes)
    return [device.get(out, nothing(1, rows)).float() for out in outs]


@pytest.mark.parametrize(("bits", "group", "kind", "scales"), FORMATS)
def test_one_token(bits: int, group: int, kind: str, scales: torch.dtype):
    torch.manual_seed(0)
    weight, x = weight_of(16, 384, bits, group, kind, scales), torch.randn(1, 384).bfloat16()
    (found,) = multiply(x, [weight], None, False, 1, 2)
    assert relative_rms(found, product(x, weight)) < TOL


def test_several_weights_and_blocks():
    torch.manual_seed(0)
    weights = [weight_of(64, 640, 4, 32, "iq4", F32) for _ in range(2)]
    x, more = torch.randn(1, 640).bfloat16(), torch.randn(64)
    for found, weight in zip(multiply(x, weights, more, False, 2, 2), weights, strict=True):
        assert relative_rms(found, product(x, weight) + more) < TOL


@pytest.mark.parametrize(("bits", "group", "kind", "scales"), [(4, 32, "iq4", F32), (4, 32, "affine", F32)])
def test_gated(bits: int, group: int, kind: str, scales: torch.dtype):
    torch.manual_seed(0)
    weights = [weight_of(32, 256, bits, group, kind, scales) for _ in range(2)]
    x = torch.randn(1, 256).bfloat16()
    gate, up = (product(x, weight) for weight in weights)
    (found,) = multiply(x, weights, None, True, 2, 2)
    assert relative_rms(found, torch.nn.functional.silu(gate) * up) < 1e-2
