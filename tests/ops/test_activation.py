"""Activations against torch and transformers, at their limits, and with invalid arguments."""

import pytest
import torch
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from auraflux.errors import InputError
from auraflux.ops._dispatch import use_backend
from auraflux.ops.activation.reference import clamped_swiglu, geglu, sigmoid_gate, split_q_gate, swiglu


@pytest.fixture(params=["reference", "cpu"], autouse=True)
def _backend(request):
    with use_backend(request.param):
        yield


def test_swiglu_is_silu_times_up():
    gate, up = torch.randn(3, 77), torch.randn(3, 77)
    torch.testing.assert_close(swiglu(gate, up), gate / (1 + torch.exp(-gate)) * up)


def test_geglu_is_the_tanh_form():
    gate, up = torch.linspace(-12, 12, 4001), torch.ones(4001)
    exact = gate.double()
    expected = 0.5 * exact * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (exact + 0.044715 * exact**3)))
    torch.testing.assert_close(geglu(gate, up).double(), expected, atol=1e-6, rtol=1e-5)


def test_clamped_swiglu_is_that_of_gpt_oss():
    config = GptOssConfig(hidden_size=4, intermediate_size=4, num_local_experts=1, num_hidden_layers=1)
    experts = GptOssExperts(config)
    gate_up = torch.randn(50, 64) * 6
    expected = experts._apply_gate(gate_up)
    found = clamped_swiglu(gate_up[:, ::2].contiguous(), gate_up[:, 1::2].contiguous(), experts.alpha, experts.limit)
    torch.testing.assert_close(found, expected)


def test_clamped_swiglu_clamps_the_gate_only_from_above():
    gate, up = torch.tensor([100.0, 7.0, -100.0]), torch.tensor([0.0, 0.0, 0.0])
    high, limit, low = clamped_swiglu(gate, up, 1.0, 7.0).tolist()
    assert high == limit
    assert low == pytest.approx(0.0, abs=1e-30)


@pytest.mark.parametrize("op", [swiglu, geglu, sigmoid_gate, lambda x, y: clamped_swiglu(x, y, 1.702, 7.0)])
def test_large_inputs_stay_finite_and_nan_shows(op):
    x = torch.tensor([1e4, -1e4, 88.0, -88.0, 0.0, torch.nan])
    out = op(x, x)
    assert out[:5].isfinite().all()
    assert out[5].isnan()


def test_sigmoid_gate_opens_and_shuts():
    x = torch.randn(5)
    assert torch.equal(sigmoid_gate(x, torch.full((5,), 200.0)), x)
    assert torch.equal(sigmoid_gate(x, torch.full((5,), -200.0)).abs(), torch.zeros(5))
    torch.testing.assert_close(sigmoid_gate(x, torch.zeros(5)), x / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_split_q_gate_splits_heads(dtype):
    x = torch.randn(5, 3 * 2 * 7).to(dtype)
    q, gate = split_q_gate(x, 3)
    expected_q, expected_gate = x.view(5, 3, 14).chunk(2, dim=-1)
    assert torch.equal(q, expected_q)
    assert torch.equal(gate, expected_gate)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_have_the_dtype_of_the_first_argument(dtype):
    x = torch.randn(4, 6).to(dtype)
    assert {op(x, torch.randn(4, 6)).dtype for op in (swiglu, geglu, sigmoid_gate)} == {dtype}


def test_many_elements_and_few_give_the_same():
    gate, up = torch.randn(100_003), torch.randn(100_003)
    for op in (swiglu, geglu, sigmoid_gate):
        torch.testing.assert_close(op(gate, up)[:100], op(gate[:100], up[:100]))
        torch.testing.assert_close(op(gate, up)[-100:], op(gate[-100:].clone(), up[-100:].clone()))


def test_arguments_that_do_not_fit_are_refused():
    x = torch.randn(4, 6)
    with pytest.raises(InputError, match=r"'up' has shape \[4, 5\]; \[4, 6\] is needed"):
        swiglu(x, torch.randn(4, 5))
    with pytest.raises(InputError, match=r"'up' .* is not contiguous"):
        geglu(x, torch.randn(6, 4).T)
    with pytest.raises(InputError, match=r"'gate' has shape \[6\]"):
        sigmoid_gate(x, torch.randn(6))
    with pytest.raises(InputError, match=r"limit is -1\.0; a positive limit is needed"):
        clamped_swiglu(x, x, 1.0, -1.0)
    with pytest.raises(InputError, match="rows of 6 do not divide into a query and a gate for each of 2 heads"):
        split_q_gate(x, 2)
    with pytest.raises(InputError, match="for each of 0 heads"):
        split_q_gate(x, 0)
