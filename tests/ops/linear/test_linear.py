"""Products with weights: independent oracles, properties, and input that does not fit."""

import mlx.core as mx
import pytest
import torch

from auraflux.errors import InputError
from auraflux.ops import embed, gate_up_swiglu, linear, linears
from auraflux.ops._cases import relative_rms
from auraflux.ops._dispatch import OPS, activation_bits, exact
from auraflux.ops.linear._inputs import weight
from auraflux.ops.linear.cpu import products
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.threads import set_threads, threads
from auraflux.quant import QTensor, affine, quantize
from auraflux.quant.fp8 import from_blocks
from auraflux.quant.packing import pack
from tests.mlx_arrays import from_mlx, to_mlx
from tests.ops.quick import some


# the formats of test_parity.py, which has 2 and 6 bits in other groups; test_formats.py holds all of them to mlx
@pytest.mark.parametrize("bits", some(affine.BITS, (3, 4, 5, 8)))
@pytest.mark.parametrize("tokens", [1, 9])
def test_exact_product_is_mlx(bits: int, tokens: int):
    torch.manual_seed(bits)
    x, w = torch.randn(tokens, 256), quantize(torch.randn(100, 256).bfloat16(), bits, 64)
    arrays = (mx.array(w.packed.numpy()).view(mx.uint32), to_mlx(w.scales.float()), to_mlx(w.biases.float()))
    theirs = from_mlx(mx.quantized_matmul(to_mlx(x), *arrays, transpose=True, group_size=64, bits=bits))
    with exact():
        assert relative_rms(linear(x, w.interleave(ISA.lanes)), theirs) < 1e-5


@pytest.mark.parametrize("bits", some(affine.BITS, (4, 5, 8)))
def test_rounding_activations_costs_less_than_one_percent(bits: int):
    torch.manual_seed(bits)
    x, w = torch.randn(4, 1024), weight(256, 1024, bits)
    with exact():
        wanted = linear(x, w)
    assert relative_rms(linear(x, w), wanted) < 1e-2


@pytest.mark.parametrize("tokens", [1, 9, 20])
@pytest.mark.parametrize("bits", some(affine.BITS, (4, 8)))
def test_activations_of_16_bits_cost_a_hundredth_of_those_of_8(bits: int, tokens: int):
    torch.manual_seed(0)
    x, w = torch.randn(tokens, 512), weight(96, 512, bits).interleave(ISA.lanes)
    x[:, 5] *= 50  # in a group with an outlier, other values have fewer bits
    with exact():
        wanted = linear(x, w)
    with activation_bits(16):
        found = linear(x, w)
        assert all(torch.equal(linear(row[None], w)[0], each) for row, each in zip(x, found, strict=True))
    assert relative_rms(found, wanted) < relative_rms(linear(x, w), wanted) / 100


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_a_nan_affects_its_own_token(bits: int):
    x, w = torch.randn(3, 128), weight(64, 128, 4).interleave(ISA.lanes)
    x[1, 7] = torch.nan
    with activation_bits(bits):
        found = linear(x, w)
    assert torch.isnan(found[1]).all()
    assert torch.isfinite(found[::2]).all()


def test_fast_product_of_integers_has_no_error():
    # activations of size 127 at most, one of them 127 in every group, round to themselves
    torch.manual_seed(0)
    x = torch.randint(-127, 128, (3, 256)).float()
    x[:, ::64] = 127
    codes = torch.randint(0, 16, (48, 256)).float()
    codes[:, 0::64], codes[:, 1::64] = 15, 0
    w = quantize(codes.bfloat16(), 4, 64)
    assert torch.equal(w.dequantize(torch.float32), codes)
    assert torch.equal(linear(x, w.interleave(ISA.lanes)), x @ codes.T)


def test_token_order_and_company_do_not_matter():
    torch.manual_seed(0)
    x, w = torch.randn(19, 128), weight(64, 128, 4)
    together = linear(x, w)
    for token in range(19):
        assert torch.equal(linear(x[token : token + 1], w)[0], linear(x[token : token + 1], w)[0])
        assert relative_rms(linear(x[token : token + 1], w)[0], together[token]) < 1e-6


def test_row_order_gives_the_same_numbers():
    torch.manual_seed(0)
    x, w = torch.randn(5, 192), quantize(torch.randn(75, 192).bfloat16(), 4, 64)
    assert torch.equal(linear(x, w), linear(x, w.interleave(ISA.lanes)))


def test_products_together_are_those_one_by_one():
    x, weights = torch.randn(2, 3, 128), [weight(rows, 128, 4) for rows in (100, 32, 33)]
    for found, w in zip(linears(x, weights), weights, strict=True):
        assert found.shape == (2, 3, w.shape[0])
        assert torch.equal(found, linear(x, w))


def test_leading_axes_are_preserved():
    w = weight(32, 64, 4)
    assert linear(torch.randn(2, 3, 64), w).shape == (2, 3, 32)
    assert linear(torch.randn(64), w).shape == (32,)
    assert gate_up_swiglu(torch.randn(2, 3, 64), w, w).shape == (2, 3, 32)


def test_extreme_activations():
    torch.manual_seed(0)
    w = weight(32, 128, 4)
    for scale in (1e-38, 1e-20, 1e20, 1e35):
        x = torch.randn(2, 128) * scale
        with exact():
            wanted = linear(x, w)
        found = linear(x, w)
        assert torch.isfinite(found).all()
        if scale > 1e-30:
            assert relative_rms(found, wanted) < 2e-2


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("spread", [1, 300, 1e5])
def test_exact_products_err_as_float32_does(bits: int, spread: float):
    # some inputs are much larger than the others of their group
    torch.manual_seed(bits)
    x, w = torch.randn(3, 1024), weight(64, 1024, bits)
    x[:, ::77] *= spread
    wanted = (x.double() @ w.dequantize(torch.float64).T).float()
    with exact():
        assert relative_rms(linear(x, w), wanted) < 1e-6


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e35])
def test_exact_products_of_any_size(scale: float):
    torch.manual_seed(0)
    x, w = torch.randn(2, 128), weight(32, 128, 4)
    with exact():
        assert relative_rms(linear(x * scale, w).double() / scale, linear(x, w).double()) < 1e-5


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_an_exact_product_of_no_number_is_none(value: float):
    x, w = torch.randn(9, 128), weight(32, 128, 4)
    x[4, 3] = value
    with exact():
        found = linear(x, w)
    assert not found[4].isfinite().any()
    assert found[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


def test_a_nan_reaches_only_its_token():
    x, w = torch.randn(9, 128), weight(32, 128, 4)
    x[4, 3] = torch.nan
    found = linear(x, w)
    assert found[4].isnan().all()
    assert not found[[0, 1, 2, 3, 5, 6, 7, 8]].isnan().any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear(torch.randn(2, 100), weight(32, 64, 4)), "'x' has width 100, 'weight' takes 64 inputs"),
        (lambda: linear(torch.randn(64, 2).T, weight(32, 64, 4)), "'x' .* is not contiguous"),
        (lambda: linear(torch.randn(2, 64), weight(32, 64, 4).to("meta")), "'weight' is on meta, the first argument on cpu"),
        (lambda: linear(torch.randn(2, 64), weight(32, 64, 4), torch.randn(31)), r"'bias' has shape \[31\]; \[32\] is needed"),
        (lambda: linear(torch.ones(2, 64, dtype=torch.int32), weight(32, 64, 4)), "'x' has dtype int32"),
        (lambda: linear(torch.randn(2, 64), quantize(torch.randn(2, 32, 64))), "a matrix .N, K. is needed"),
        (lambda: gate_up_swiglu(torch.randn(2, 64), weight(32, 64, 4), weight(16, 64, 4)), "'up' .16, 64.; they must be equal"),
        (lambda: linears(torch.randn(1, 64), ()), "no weights were given"),
        (lambda: linears(torch.randn(1, 64), (weight(32, 64, 4), weight(32, 128, 4))), "'x' has width 64, 'weights' takes 128"),
        (lambda: linears(torch.randn(1, 64), (weight(32, 64, 4),), ()), "0 biases were given for 1 weights"),
        (lambda: linears(torch.randn(1, 64), (weight(32, 64, 4),), (torch.ones(31),)), "'biases' has shape"),
        (lambda: embed(torch.tensor([0, 32]), weight(32, 64, 4)), "ids reach from 0 to 32; the table has 32 rows"),
        (lambda: embed(torch.tensor([-1]), weight(32, 64, 4)), "ids reach from -1 to -1"),
        (lambda: embed(torch.tensor([0.5]), weight(32, 64, 4)), "'ids' has dtype float32; int32 or int64 is needed"),
    ],
)
def test_input_that_does_not_fit_is_refused(call, message: str):
    with pytest.raises(InputError, match=message):
        call()


def test_foreign_interleaving_is_declined_and_still_right():
    w = quantize(torch.randn(32, 64).bfloat16(), 4, 64).interleave(2)
    x = torch.randn(2, 64)
    with exact():
        assert relative_rms(linear(x, w), x @ w.dequantize(torch.float32).T) < 1e-5
    assert any("interleaved by 2" in reason for reason in OPS["linear"].declined["cpu"])


@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_half_precision_costs_fp8_a_thousandth(spread: float):
    """Also where a few activations are far larger than the others, which int8 would round to zero."""
    g = torch.Generator().manual_seed(4)
    codes = (torch.randn(64, 1024, generator=g) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    made = from_blocks(codes, torch.rand(64, 8, generator=g) + 0.01, (1, 128))
    assert isinstance(made, QTensor)
    x = torch.randn(20, 1024, generator=g) * torch.exp(spread * torch.randn(20, 1024, generator=g))
    found, wanted = linear(x, made.interleave(ISA.lanes)), x.double() @ made.dequantize().double().T
    assert relative_rms(found.double(), wanted) < 2e-3
    assert torch.equal(linear(x[7:8], made.interleave(ISA.lanes)), found[7:8])


@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_every_fp8_code_is_exact(tokens: int):
    # all numbers of e4m3, denormals too, each times 1 where every other activation is 0
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    made = from_blocks(codes.view(torch.float8_e4m3fn).repeat(16, 1), torch.ones(16, 2), (1, 128))
    assert isinstance(made, QTensor)
    for first in range(0, 256, tokens):
        x = torch.eye(256)[first : first + tokens]
        assert torch.equal(linear(x, made.interleave(ISA.lanes)), x @ made.dequantize().T)


def test_fp8_products_have_the_same_bits_alone_and_together():
    g = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 0x7F, (48, 512), generator=g).to(torch.uint8).view(torch.float8_e4m3fn)
    made = from_blocks(codes, torch.rand(48, 4, generator=g) + 0.01, (1, 128))
    assert isinstance(made, QTensor)
    x, w = torch.randn(21, 512, generator=g), made.interleave(ISA.lanes)
    for exactly in (False, True):
        with exact(exactly):
            together = linear(x, w)
            for some_tokens in (slice(0, 1), slice(3, 7), slice(5, 21)):
                assert torch.equal(linear(x[some_tokens], w), together[some_tokens])


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
def test_largest_codes_times_largest_activations_do_not_overflow(bits: int):
    # AVX2 adds pairs of products in 16 bits
    codes = torch.full((16, 256), 2**bits - 1, dtype=torch.uint8)
    w = QTensor(pack(codes, bits), torch.ones(16, 4), torch.zeros(16, 4), bits, 64, (16, 256)).interleave(ISA.lanes)
    for sign in (1, -1):
        for tokens in (1, 20):
            x = torch.full((tokens, 256), 127.0 * sign)
            assert torch.equal(linear(x, w), torch.full((tokens, 16), sign * 127.0 * 256 * (2**bits - 1)))


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("several_from", [1 << 60, 0])
def test_results_do_not_depend_on_threads_and_jobs(monkeypatch: pytest.MonkeyPatch, tokens: int, several_from: int):
    monkeypatch.setattr(products, "SEVERAL_FROM", several_from)
    torch.manual_seed(0)
    weights = [quantize(torch.randn(rows, 256).bfloat16(), 4, 64).interleave(ISA.lanes) for rows in (530, 16, 100)]
    x, count = torch.randn(tokens, 256), threads()
    try:
        set_threads(1)
        expected = linears.run(x, weights)
    finally:
        set_threads(count)
    for found, each in zip(linears.run(x, weights), expected, strict=True):
        assert torch.equal(found, each)
