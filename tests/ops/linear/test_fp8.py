"""Products in FP8: the rounding of operands, when the route is taken, and on a GPU the products."""

import pytest
import torch
from torch import Tensor

from auraflux.engine.device import check_fp8
from auraflux.errors import SettingsError
from auraflux.loading.options import LoadOptions
from auraflux.ops import use_backend
from auraflux.ops._dispatch import fp8_products
from auraflux.ops.fake_gpu import use_fake_gpu
from auraflux.ops.linear.cuda.call import Call, Norm
from auraflux.ops.linear.cuda.dequantize import dense_weight
from auraflux.ops.linear.cuda.gemm import fp8
from auraflux.ops.linear.cuda.routes import PRODUCTS
from auraflux.ops.linear.reference import add_norm_gate_up, add_norm_linears, linear
from auraflux.quant import QTensor, quantize


def weight_of(rows: int, width: int, bits: int = 4, device: str = "cpu") -> QTensor:
    return quantize(torch.randn(rows, width).to(device, torch.bfloat16), bits, 64)


def check_rounded(values: Tensor, scales: Tensor, exact: Tensor) -> None:
    """Check that values are the e4m3 numbers nearest to the exact ones over their row's scale, rounded in float32."""
    assert values.dtype is torch.float8_e4m3fn
    quotients = exact.double() / scales[:, None].double()
    nearest = quotients.to(torch.float8_e4m3fn)
    if values.is_cpu:
        # Triton's interpreter loses the carry of a mantissa that rounds up to a power of two
        carried = nearest.float().abs().log2().frac() == 0
        values = torch.where(carried, nearest.float(), values.float())
    differs = values.float() != nearest.float()
    halfway = (quotients - (values.float() + nearest.float()) / 2).abs() <= 1e-5 * quotients.abs()
    assert (~differs | halfway).all()


@pytest.mark.parametrize("shape", [(3, 64), (5, 336), (2, 4096)])
def test_rows_are_rounded_by_their_own_scales(shape: tuple[int, int]) -> None:
    x = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]
    values, scales = fp8.rounded(x)
    torch.testing.assert_close(scales, x.abs().amax(1) / 448, rtol=1e-6, atol=0)
    check_rounded(values, scales, x)


def test_a_row_of_zeros_stays_zero() -> None:
    values, scales = fp8.rounded(torch.zeros(2, 64))
    assert not values.float().any()
    assert scales.isfinite().all()


def test_weights_of_4_bits_are_rounded() -> None:
    weight = weight_of(6, 320)
    check_rounded(*fp8.rounded_weight(weight, torch.bfloat16), weight.dequantize(torch.float32))


def test_other_weights_are_dequantized_first() -> None:
    weight = weight_of(6, 320, 8)
    values, scales = fp8.rounded_weight(weight, torch.bfloat16)
    check_rounded(values, scales, dense_weight(weight, torch.bfloat16))


def call_of(tokens: int, rows: int = 256, width: int = 256, *, norm: bool = False) -> Call:
    x = torch.empty(tokens, width, dtype=torch.bfloat16)
    return Call(x, [weight_of(rows, width)] * 2, gated=True, norm=Norm(None, torch.ones(width), 1e-6) if norm else None)


def test_the_route_is_taken_on_request_only() -> None:
    with use_fake_gpu((8, 9)):
        assert PRODUCTS.first(call_of(1024)).name != "gemm_fp8"
        with fp8_products():
            assert PRODUCTS.first(call_of(1024)).name == "gemm_fp8"
            assert PRODUCTS.first(call_of(1024, norm=True)).name == "gemm_fp8"
            assert PRODUCTS.first(call_of(256)).name != "gemm_fp8"
            assert PRODUCTS.first(call_of(1024, rows=264)).name != "gemm_fp8"
    with use_fake_gpu((8, 6)), fp8_products():
        assert PRODUCTS.first(call_of(1024)).name != "gemm_fp8"


def test_options_that_exclude_each_other() -> None:
    for options in (
        LoadOptions(prefill="fp4"),
        LoadOptions(prefill="fp8", invariant=True),
        LoadOptions(prefill="fp8", parallel="pipeline=2"),
    ):
        with pytest.raises(SettingsError):
            options.check()
    LoadOptions(prefill="fp8").check()


def test_a_cpu_is_refused() -> None:
    with pytest.raises(SettingsError, match="runs on cpu"):
        check_fp8(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("tokens", [512, 1000, 2048])
def test_products_are_those_of_rounded_operands(tokens: int, bits: int) -> None:
    x = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
    weight = weight_of(768, 1024, bits, "cuda")
    (a, a_scales), (b, b_scales) = fp8.rounded(x), fp8.rounded_weight(weight, torch.bfloat16)
    expected = (a.double() * a_scales[:, None]) @ (b.double() * b_scales[:, None]).T
    with fp8_products():
        found = linear(x, weight)
    assert (found.double() - expected).norm() / expected.norm() < 3e-3  # rounding to bf16
    with use_backend("reference"):
        exact = linear(x, weight).double()
    assert 1e-3 < (found.double() - exact).norm() / exact.norm() < 0.06


@pytest.mark.gpu
def test_norms_and_gates() -> None:
    x, delta = torch.randn(2, 600, 512, device="cuda", dtype=torch.bfloat16).unbind()
    norm, weights = torch.rand(512, device="cuda"), [weight_of(rows, 512, 4, "cuda") for rows in (256, 256, 64)]
    with fp8_products():
        total, hidden = add_norm_gate_up(x, delta, norm, 1e-6, *weights[:2])
        _, products = add_norm_linears(x, delta, norm, 1e-6, weights)
    expected_total, expected_hidden = add_norm_gate_up(x, delta, norm, 1e-6, *weights[:2])
    _, expected = add_norm_linears(x, delta, norm, 1e-6, weights)
    assert torch.equal(total, expected_total)
    for found, exact in zip((hidden, *products), (expected_hidden, *expected), strict=True):
        assert (found.float() - exact.float()).norm() / exact.float().norm() < 0.1
