"""Products by AMX: equal to the bit to those by vectors."""

import os
import subprocess
import sys

import numba
import pytest
import torch
from llvmlite import ir

from auraflux.ops.linear.cpu import matrix_tiles
from auraflux.ops.linear.cpu import products as product_lists
from auraflux.ops.linear.cpu.matrix_tiles import FULL, HALF, MATRIX_FROM, SUMS, TOKENS
from auraflux.ops.linear.cpu.products import FIELDS, Driver, driver, multiply, padded
from auraflux.ops.simd import amx, isa
from auraflux.ops.simd.isa import ISA, ISAS
from auraflux.ops.simd.processor import cpu_features
from auraflux.ops.simd.threads import set_threads, threads
from auraflux.ops.simd.vectors import I32, I64, call, kernel, store
from auraflux.quant import QTensor, quantize
from tests.ops.linear.emulated_amx import emulate
from tests.ops.linear.test_super_blocks import weight as super_blocks
from tests.ops.quick import some

AMX = ISAS["avx512-amx"]
EMULATED = not ISA.matrix_tiles and ISA.name == "avx512-vnni"
needs_amx = pytest.mark.skipif(not ISA.matrix_tiles, reason="this processor has no AMX, or AURAFLUX_ISA excludes it")
needs_tiles = pytest.mark.skipif(not (ISA.matrix_tiles or EMULATED), reason="tiles are emulated with AVX-512 VNNI only")
if EMULATED:
    emulate({tile: size for size in (FULL, HALF) for tile in (SUMS[size], TOKENS[size])})
# bits, group and kind; each compiles for seconds, so three are quick
FORMATS = some(
    [
        (4, 64, "affine"), (8, 64, "affine"), (4, 32, "affine"), (3, 128, "affine"), (6, 32, "affine"), (8, 128, "affine"),
        (4, 32, "mxfp4"), (4, 32, "iq4"), (4, 32, "iq4_nl"),
    ],
    {(4, 64, "affine"), (8, 128, "affine"), (4, 32, "mxfp4")},
)  # fmt: skip


def weight_of(rows: int, width: int, bits: int = 4, group: int = 64, kind: str = "affine") -> QTensor:
    numbers = torch.randn(rows, width)
    return quantize(numbers.bfloat16() if kind == "affine" else numbers, bits, group, kind)


def drivers(weight: QTensor, activation_bits: int = 8) -> tuple[Driver, Driver]:
    """Return the driver with AMX and the one without."""
    bits, group, _, storage = weight.format
    return driver(activation_bits, bits, group, storage, by_tiles=True), driver(activation_bits, bits, group, storage)


def assert_equal(x: torch.Tensor, weights: list[QTensor], activation_bits: int = 8) -> None:
    tiled, plain = (multiply(each, x, weights) for each in drivers(weights[0], activation_bits))
    for found, expected in zip(tiled, plain, strict=True):
        assert torch.equal(found, expected)


@needs_tiles
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_products_are_those_by_vectors(form: tuple[int, int, str]):
    torch.manual_seed(0)
    weight = weight_of(50, 384, *form)
    for tokens in (1, MATRIX_FROM - 1, MATRIX_FROM, 8, 9, 16, 17, 21, 43):
        x = torch.randn(tokens, 384)
        assert_equal(x, [weight])
        assert_equal(x, [weight.interleave(ISA.lanes)])


@needs_tiles
@pytest.mark.parametrize("group", some([32, 64, 128], {64}))
@pytest.mark.parametrize("activation_bits", [16, 32])
def test_products_of_several_digits_are_those_by_vectors(group: int, activation_bits: int):
    torch.manual_seed(0)
    weights = [weight_of(rows, 256, 4, group).interleave(ISA.lanes) for rows in (16, 40)]
    for tokens in (5, 20):
        assert_equal(torch.randn(tokens, 256), weights, activation_bits)


@needs_tiles
@pytest.mark.parametrize("kind", some(["q4_k", "iq4_xs"], {"q4_k"}))
def test_super_blocks(kind: str):
    torch.manual_seed(0)
    assert_equal(torch.randn(21, 512), [super_blocks(kind, 40, 512)])


@needs_tiles
def test_wide_weights_are_unpacked_in_pieces_and_tokens_pass_in_panels(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    weight = weight_of(40, matrix_tiles.INPUTS * 2 + 320)
    # one tile at a time
    monkeypatch.setattr(matrix_tiles, "PANEL_NBYTES", 1)
    assert_equal(torch.randn(52, weight.shape[1]), [weight.interleave(ISA.lanes)])


@needs_tiles
@pytest.mark.parametrize("several_from", [1 << 60, 0])
def test_one_thread_and_all(monkeypatch: pytest.MonkeyPatch, several_from: int):
    monkeypatch.setattr(product_lists, "SEVERAL_FROM", several_from)
    torch.manual_seed(0)
    weight, x, count = weight_of(530, 256), torch.randn(33, 256), threads()
    try:
        set_threads(1)
        assert_equal(x, [weight])
    finally:
        set_threads(count)
    assert_equal(x, [weight])


@needs_tiles
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30, 1e-40, 0.0])
def test_extreme_activations(value: float):
    torch.manual_seed(0)
    weight, x = weight_of(32, 128), torch.randn(7, 128)
    x[3, 70] = value
    if value in (0.0, 1e-40):
        x[4] = value
    tiled, plain = (multiply(each, x, [weight])[0] for each in drivers(weight))
    torch.testing.assert_close(tiled, plain, rtol=0, atol=0, equal_nan=True)


@needs_tiles
@pytest.mark.parametrize("several_from", [1 << 60, 0])
@pytest.mark.parametrize("width", [128, 512])
def test_scattered_tokens_of_several_products(monkeypatch: pytest.MonkeyPatch, width: int, several_from: int):
    """As the experts of a mixture: each product has its own tokens, some too few for tiles."""
    monkeypatch.setattr(product_lists, "SEVERAL_FROM", several_from)
    torch.manual_seed(0)
    rows, tokens = 48, 30
    weights = [weight_of(rows, width).interleave(ISA.lanes) for _ in range(4)]
    x, counts = torch.randn(tokens, width), (20, 3, 7, 0)
    indices = [torch.randperm(tokens)[:count] for count in counts]

    def run(steps: Driver) -> list[torch.Tensor]:
        # a row more, which nobody may write to
        outs = [torch.full((count + 1, padded(rows)), 7.0) for count in counts]
        products = torch.empty(len(counts), FIELDS, dtype=torch.int64)
        for i, (weight, index, out) in enumerate(zip(weights, indices, outs, strict=True)):
            at = index.data_ptr() if len(index) else 0
            numbers = (*weight.addresses, at, len(index), out.data_ptr(), rows, 4 * out.shape[1])
            products[i] = torch.tensor(numbers)
        steps(x.data_ptr(), tokens, weights[0], products.data_ptr(), len(products))
        return outs

    for found, expected in zip(*map(run, drivers(weights[0])), strict=True):
        assert torch.equal(found, expected)
        assert (found[-1] == 7).all()


@kernel(constants=0)
def _state_in_use(b: ir.IRBuilder, out: ir.Value) -> None:
    """Store the processor's bitmap of extended state in use."""
    store(b, call(b, "llvm.x86.xgetbv", I64, ir.Constant(I32, 1)), out, 0)


@needs_amx
def test_tiles_are_released():
    @numba.njit
    def ask(out):
        _state_in_use((out,))

    torch.manual_seed(0)
    found = torch.zeros(1, dtype=torch.int64)
    weight = weight_of(16, 64)
    multiply(drivers(weight)[0], torch.randn(16, 64), [weight])
    ask(found.data_ptr())
    assert int(found) & 1
    assert not int(found) >> amx.TILE_DATA & 1


@pytest.mark.skipif(not {*AMX.features} <= cpu_features(), reason="this processor has no AMX")
def test_without_permission_vectors_are_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AURAFLUX_ISA", raising=False)
    monkeypatch.setattr(amx, "is_permitted", lambda: False)
    assert isa._choose().name == "avx512-vnni"
    monkeypatch.setattr(amx, "is_permitted", lambda: True)
    assert isa._choose().name == "avx512-amx"


@needs_amx
@pytest.mark.slow
@pytest.mark.parametrize("name", ["avx512-vnni", "avx2", "portable"])
def test_other_levels_do_without(name: str):
    code = (
        "import torch; from auraflux.ops import linear; from auraflux.ops.simd.isa import ISA;"
        "from auraflux.quant import quantize;"
        "torch.manual_seed(0); w = quantize(torch.randn(40, 256).bfloat16(), 4, 64).interleave(ISA.lanes);"
        "x = torch.randn(20, 256); y = linear(x, w); z = x @ w.dequantize(torch.float32).T;"
        "print(ISA.name, float((y - z).norm() / z.norm()) < 0.02)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "AURAFLUX_ISA": name}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [name, "True"], done.stderr
