"""Norms against torch and transformers, their symmetries, and invalid arguments."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated, l2norm

from auraflux.errors import InputError
from auraflux.ops._dispatch import use_backend
from auraflux.ops.norm.reference import add_rms_norm, gated_rms_norm, group_rms_norm, qk_norm, rms_norm

SHAPES = pytest.mark.parametrize("shape", [(1, 2880), (3, 5, 63), (2, 1), (70, 1024)], ids=str)


@pytest.fixture(params=["reference", "cpu"], autouse=True)
def _backend(request):
    with use_backend(request.param):
        yield


@SHAPES
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
def test_rms_norm_is_that_of_torch(shape, eps):
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    torch.testing.assert_close(rms_norm(x, weight, eps), torch_rms_norm(x, weight.shape, weight, eps))


@SHAPES
def test_add_rms_norm_is_the_norm_of_the_sum(shape):
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    found, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(found, torch_rms_norm(total, weight.shape, weight, 1e-6))


def test_add_rms_norm_normalises_the_rounded_sum():
    x, residual, weight = torch.randn(3, 100).bfloat16(), torch.randn(3, 100).bfloat16(), torch.rand(100)
    found, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(found, rms_norm(total, weight, 1e-6))


@SHAPES
def test_gated_rms_norm_is_that_of_qwen3_next(shape):
    theirs = Qwen3NextRMSNormGated(shape[-1], eps=1e-6).requires_grad_(False)
    theirs.weight.copy_(torch.randn(shape[-1]))
    x, z = torch.randn(shape), torch.randn(shape) * 4
    torch.testing.assert_close(gated_rms_norm(x, z, theirs.weight.data, 1e-6), theirs(x, z))


@pytest.mark.parametrize("shape", [(1, 8, 64), (7, 3, 63)])
def test_group_rms_norm_is_that_of_nemotron_h(shape):
    _, groups, width = shape
    theirs = NemotronHRMSNormGated(groups * width, group_size=width, eps=1e-6).requires_grad_(False)
    theirs.weight.copy_(torch.randn(groups * width))
    x, z = torch.randn(shape), torch.randn(shape) * 4
    found = group_rms_norm(x, z, theirs.weight.data.view(groups, width), 1e-6)
    torch.testing.assert_close(found.flatten(1), theirs(x.flatten(1), z.flatten(1)))


@SHAPES
def test_qk_norm_is_the_l2_norm_of_qwen3_next(shape):
    q, k = torch.randn(shape), torch.randn(shape) * 1e-3
    found_q, found_k = qk_norm(q, k, 1e-6)
    torch.testing.assert_close(found_q, l2norm(q) * shape[-1] ** -0.5)
    torch.testing.assert_close(found_k, l2norm(k))


@SHAPES
def test_qk_norm_over_means_is_the_rms_norm_of_torch(shape):
    q, k, width = torch.randn(shape), torch.randn(shape) * 1e-3, shape[-1]
    found_q, found_k = qk_norm(q, k, 1e-6, mean=True)
    torch.testing.assert_close(found_q, torch_rms_norm(q, (width,), eps=1e-6) / width)
    torch.testing.assert_close(found_k, torch_rms_norm(k, (width,), eps=1e-6) * width**-0.5)


def test_queries_and_keys_may_differ_in_heads():
    found_q, found_k = qk_norm(torch.randn(2, 8, 64), torch.randn(2, 3, 64), 1e-6)
    torch.testing.assert_close(found_q.norm(dim=-1), torch.full((2, 8), 1 / 8))
    torch.testing.assert_close(found_k.norm(dim=-1), torch.ones(2, 3))


# each norm as a function of its first argument, the others fixed
NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: rms_norm(x, torch.linspace(0.5, 2, x.shape[-1]), 0.0),
    "add_rms_norm": lambda x: add_rms_norm(x, x, torch.linspace(0.5, 2, x.shape[-1]), 0.0)[0],
    "gated_rms_norm": lambda x: gated_rms_norm(x, torch.ones_like(x), torch.linspace(0.5, 2, x.shape[-1]), 0.0),
    "q": lambda x: qk_norm(x, x, 0.0)[0],
    "k": lambda x: qk_norm(x, x, 0.0)[1],
}
EACH = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)


@EACH
@pytest.mark.parametrize("factor", [1e-12, 0.3, 7.0, 1e12])
def test_the_scale_of_a_row_does_not_matter(norm, factor):
    x = torch.randn(5, 100)
    torch.testing.assert_close(norm(x * factor), norm(x))
    torch.testing.assert_close(norm(-x), -norm(x))


@EACH
def test_a_nan_stays_in_its_row(norm):
    x = torch.randn(4, 63)
    x[2, 5] = torch.nan
    found = norm(x)
    assert found[2].isnan().all()
    assert found[[0, 1, 3]].isfinite().all()


@EACH
def test_rows_do_not_touch_each_other(norm):
    # large enough for all threads, and not evenly divisible among them
    x = torch.randn(101, 700)
    together = norm(x)
    for row in (0, 49, 50, 51, 100):
        torch.testing.assert_close(norm(x[row : row + 1]), together[row : row + 1], atol=0, rtol=1e-6)


def test_rows_of_zeros_give_zeros():
    x, weight = torch.zeros(3, 50), torch.randn(50)
    results = (
        rms_norm(x, weight, 1e-6),
        *add_rms_norm(x, x, weight, 1e-6),
        gated_rms_norm(x, torch.randn(3, 50), weight, 1e-6),
    )
    for found in (*results, *qk_norm(x, x, 1e-6)):
        assert torch.equal(found.abs(), x)


def test_a_shut_gate_lets_nothing_through():
    x, weight = torch.randn(3, 50), torch.randn(50)
    assert torch.equal(gated_rms_norm(x, torch.full((3, 50), -200.0), weight, 1e-6).abs(), torch.zeros(3, 50))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_have_the_dtype_of_the_input(dtype):
    x, weight = torch.randn(2, 3, 64).to(dtype), torch.rand(64)
    rounded = (torch_rms_norm(x.float(), (64,), weight, 1e-6)).to(dtype)
    found = rms_norm(x, weight, 1e-6)
    assert found.dtype is dtype
    torch.testing.assert_close(found, rounded)
    for result in (*add_rms_norm(x, x, weight, 1e-6), gated_rms_norm(x, x, weight, 1e-6), *qk_norm(x, x, 1e-6)):
        assert result.dtype is dtype
        assert result.shape == x.shape


def test_a_narrow_weight_is_widened():
    x, weight = torch.randn(2, 64), torch.rand(64).bfloat16()
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), rms_norm(x, weight.float(), 1e-6))


def test_no_rows_give_no_rows():
    x, weight = torch.randn(0, 64), torch.rand(64)
    assert rms_norm(x, weight, 1e-6).shape == (0, 64)
    assert gated_rms_norm(x, x, weight, 1e-6).shape == (0, 64)
    assert [t.shape for t in add_rms_norm(x, x, weight, 1e-6)] == [(0, 64)] * 2
    assert [t.shape for t in qk_norm(x, x, 1e-6)] == [(0, 64)] * 2


def test_arguments_are_left_alone():
    arguments = torch.randn(3, 64), torch.randn(3, 64), torch.rand(64)
    before = [t.clone() for t in arguments]
    rms_norm(arguments[0], arguments[2], 1e-6)
    add_rms_norm(*arguments, 1e-6)
    gated_rms_norm(*arguments, 1e-6)
    qk_norm(*arguments[:2], 1e-6)
    assert all(torch.equal(now, then) for now, then in zip(arguments, before, strict=True))


def test_shapes_that_do_not_fit_are_refused():
    x, weight = torch.randn(3, 8), torch.rand(8)
    with pytest.raises(InputError, match=r"'weight' has shape \[7\]; \[8\] is needed"):
        rms_norm(x, weight[:7], 1e-6)
    with pytest.raises(InputError, match=r"'weight' has shape \[1, 8\]; \[8\] is needed"):
        add_rms_norm(x, x, weight[None], 1e-6)
    with pytest.raises(InputError, match=r"'weight' has shape \[9\]; \[8\] is needed"):
        gated_rms_norm(x, x, torch.rand(9), 1e-6)
    with pytest.raises(InputError, match=r"'residual' has shape \[2, 8\]; \[3, 8\] is needed"):
        add_rms_norm(x, x[:2], weight, 1e-6)
    with pytest.raises(InputError, match=r"'z' has shape \[8\]; \[3, 8\] is needed"):
        gated_rms_norm(x, x[0], weight, 1e-6)
    with pytest.raises(InputError, match="q has heads of width 8, k of 6; they must be equal"):
        qk_norm(x, torch.randn(3, 6), 1e-6)
    with pytest.raises(InputError, match=r"'x' has shape \[3, 0\]; rows of at least one element are needed"):
        rms_norm(torch.randn(3, 0), torch.rand(0), 1e-6)
    with pytest.raises(InputError, match=r"'k' has shape \[\]; rows of at least one element are needed"):
        qk_norm(x, torch.tensor(1.0), 1e-6)


def test_strided_tensors_are_refused():
    x, weight = torch.randn(8, 8), torch.rand(8)
    message = r"'{}' \(8, 8\) is not contiguous \(strides \(1, 8\)\)\. Call \.contiguous\(\) on it first"
    with pytest.raises(InputError, match=message.format("x")):
        rms_norm(x.T, weight, 1e-6)
    with pytest.raises(InputError, match=message.format("residual")):
        add_rms_norm(x, x.T, weight, 1e-6)
    with pytest.raises(InputError, match=message.format("z")):
        gated_rms_norm(x, x.T, weight, 1e-6)
    with pytest.raises(InputError, match=message.format("k")):
        qk_norm(x, x.T, 1e-6)
    with pytest.raises(InputError, match=r"'weight' \(8,\) is not contiguous \(strides \(2,\)\)"):
        rms_norm(x, torch.rand(16)[::2], 1e-6)


def test_other_dtypes_are_refused():
    x, weight = torch.ones(3, 8), torch.rand(8)
    with pytest.raises(InputError, match="'x' has dtype int32; float32 or bfloat16 or float16 is needed"):
        rms_norm(x.int(), weight, 1e-6)
    with pytest.raises(InputError, match="'x' has dtype float64"):
        add_rms_norm(x.double(), x, weight, 1e-6)
    with pytest.raises(InputError, match="'x' has dtype complex64"):
        gated_rms_norm(x.cfloat(), x, weight, 1e-6)
    with pytest.raises(InputError, match="'k' has dtype int64"):
        qk_norm(x, x.long(), 1e-6)


def test_tensors_on_two_devices_are_refused():
    x, weight = torch.randn(3, 8), torch.rand(8)
    message = "'{}' is on meta, the first argument on cpu. Move one of them"
    with pytest.raises(InputError, match=message.format("weight")):
        rms_norm(x, weight.to("meta"), 1e-6)
    with pytest.raises(InputError, match=message.format("residual")):
        add_rms_norm(x, x.to("meta"), weight, 1e-6)
    with pytest.raises(InputError, match=message.format("z")):
        gated_rms_norm(x, x.to("meta"), weight, 1e-6)
    with pytest.raises(InputError, match=message.format("k")):
        qk_norm(x, x.to("meta"), 1e-6)
    with pytest.raises(InputError, match="'weight' is on cpu, the first argument on meta"):
        rms_norm(x.to("meta"), weight, 1e-6)
