"""One token times four-bit weights on Hopper, on numpy: tiles of rows, several weights, and a norm before them."""

from itertools import zip_longest

import pytest
import torch

from auraflux.ops._cases import relative_rms
from auraflux.ops.norm.reference import add_rms_norm, rms_norm

pytest.importorskip("triton")
from auraflux.ops.gpu.blocks.codes import Codes
from auraflux.ops.gpu.sizes import cdiv
from auraflux.ops.linear.cuda.adapted import NOT_ADAPTED
from auraflux.ops.linear.cuda.call import NO_NORM, FusedNorm
from auraflux.ops.linear.cuda.matvec.int4 import matvec, operands
from auraflux.ops.linear.cuda.matvec.int4_invariant import matvec_units
from auraflux.ops.linear.cuda.matvec.int4_loop import matvec_tiles
from auraflux.ops.linear.cuda.row_copies import Product
from tests.emulator.ptx import Device, Machine
from tests.ops.linear.test_hopper import TOL, nothing, product, weight_of
from tests.ops.quick import by_pairs

EPS, WARPS, DEEP = 1e-6, 2, 3


def multiply(
    stream: tuple, weights: list, gated: bool, tiles: int, share: int | None = None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Run every program of `matvec`; return the products and the sum x + delta.

    share  if given, run `matvec_units`
    """
    device, width = Device(), weights[0].shape[1]
    x, delta, norm = stream
    rows = [weight.shape[0] for weight in weights]
    outs = [device.put(nothing(1, count)) for count in (rows[:1] if gated else rows)]
    total = device.put(nothing(1, width))
    normed = NO_NORM if norm is None else FusedNorm(device.put(delta), device.put(norm), total, EPS)
    # as the kernel is given them: bytes of codes, and scales four at a time
    codes = [Codes(*(device.put(part) for part in operands(weight))) for weight in weights]
    products = tuple(Product(each, out) for each, out in zip_longest(codes, outs))
    each = (8 if gated else 16) * tiles
    ends = tuple(sum(rows[: number + 1]) // each for number in range(len(outs)))
    args = device.put(x), normed, products, ends[:-1]
    kernel, adapted, more = (matvec, NOT_ADAPTED[:1], NOT_ADAPTED[1:]) if share is None else (matvec_units, (), (share,))
    for program in range(ends[-1]):
        Machine(device, WARPS, program).program(kernel)(*args, *adapted, gated, width, tiles, WARPS, DEEP, *more)
    found = [device.get(out, nothing(1, count)).float() for out, count in zip(outs, rows, strict=False)]
    return found, device.get(total, nothing(1, width))


def stream_of(width: int, kind: str) -> tuple:
    x, delta, norm = torch.randn(1, width).bfloat16(), torch.randn(1, width).bfloat16(), torch.rand(width) + 0.5
    return {"plain": (x, None, None), "normed": (x, None, norm), "summed": (x, delta, norm)}[kind]


def read(stream: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of the product, and the sum x + delta."""
    x, delta, norm = stream
    if norm is None:
        return x, x
    return (rms_norm(x, norm, EPS), x) if delta is None else add_rms_norm(delta, x, norm, EPS)


SIZES = [(256, 1), (768, 2), (1280, 1), (2048, 2), (512, 4)]


@pytest.mark.parametrize(("size", "kind", "share"), by_pairs(SIZES, ["plain", "normed", "summed"], [None, 1, 3]))
def test_rows_in_tiles(size: tuple[int, int], kind: str, share: int | None):
    width, tiles = size
    torch.manual_seed(width)
    stream, weight = stream_of(width, kind), weight_of(32 * tiles, width, 4, 64)
    (found,), total = multiply(stream, [weight], False, tiles, share)
    h, wanted_total = read(stream)
    assert relative_rms(found, product(h, weight)) < TOL
    if kind == "summed":
        assert torch.equal(total, wanted_total)


@pytest.mark.parametrize("share", [None, 4])
def test_several_weights_and_a_norm(share: int | None):
    torch.manual_seed(0)
    stream, weights = stream_of(1024, "summed"), [weight_of(rows, 1024, 4, 64) for rows in (64, 32, 32)]
    found, _ = multiply(stream, weights, False, 2, share)
    for mine, weight in zip(found, weights, strict=True):
        assert relative_rms(mine, product(read(stream)[0], weight)) < TOL


@pytest.mark.parametrize("share", [None, 2])
@pytest.mark.parametrize("tiles", [1, 2])
def test_gated_and_a_norm(tiles: int, share: int | None):
    torch.manual_seed(0)
    stream, (gate, up) = stream_of(768, "summed"), (weight_of(32, 768, 4, 64) for _ in range(2))
    (found,), _ = multiply(stream, [gate, up], True, tiles, share)
    h, _ = read(stream)
    first, second = (product(h, weight).bfloat16().float() for weight in (gate, up))
    assert relative_rms(found, torch.nn.functional.silu(first) * second) < 2 * TOL


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("width", "rows", "programs", "unrolled", "deep"),
    # programs of as many tiles and not, partial iterations, rings of one tile and of two, and of half a tile
    [(1024, 96, 2, 1, 2), (1024, 112, 2, 2, 4), (2048, 80, 2, 1, 4), (2048, 64, 3, 2, 8), (2048, 48, 1, 1, 2)],
)
@pytest.mark.parametrize("kind", ["plain", "summed"])
@pytest.mark.parametrize("gated", [False, True])
def test_tiles_in_a_loop(width: int, rows: int, programs: int, unrolled: int, deep: int, kind: str, gated: bool):
    torch.manual_seed(width)
    device, stream = Device(), stream_of(width, kind)
    x, delta, norm = stream
    weights = [weight_of(rows, width, 4, 64) for _ in range(1 + gated)]
    out, total, tiles = device.put(nothing(1, rows)), device.put(nothing(1, width)), rows // (8 if gated else 16)
    normed = NO_NORM if norm is None else FusedNorm(device.put(delta), device.put(norm), total, EPS)
    codes = [Codes(*(device.put(part) for part in operands(weight))) for weight in weights]
    products = tuple(Product(each, one) for each, one in zip_longest(codes, [out]))
    count = cdiv(cdiv(tiles, programs), unrolled) * unrolled
    for program in range(programs):
        kernel = Machine(device, WARPS, program, programs=programs).program(matvec_tiles)
        kernel(device.put(x), normed, products, tiles, gated, width, count, unrolled, WARPS, deep)
    found, h = device.get(out, nothing(1, rows)).float(), read(stream)[0]
    wanted = [product(h, weight) for weight in weights]
    if gated:
        first, second = (each.bfloat16().float() for each in wanted)
        wanted = [torch.nn.functional.silu(first) * second]
    assert relative_rms(found, wanted[0]) < (2 if gated else 1) * TOL
    if kind == "summed":
        assert torch.equal(device.get(total, nothing(1, width)), read(stream)[1])
