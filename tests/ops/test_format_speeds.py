"""Speeds of weight formats, stated by every route that multiplies by a weight."""

import pytest
import torch

from auraflux.ops import exact
from auraflux.ops.format_speeds import NO_KERNEL, fake_weight, speed_of
from auraflux.ops.linear.reference import linear
from auraflux.ops.moe.reference import expert_mlp
from auraflux.ops.routes import routes_of
from auraflux.ops.simd.isa import ISA
from auraflux.quant import QTensor, quantize

OPS = {"linear": linear, "moe": expert_mlp}
FORMATS = {
    "4 bits": (4, 64, torch.bfloat16, True),
    "3 bits": (3, 32, torch.bfloat16, True),
    "AWQ": (4, 128, torch.float32, True),
    "Q8_0": (8, 32, torch.float16, True),
    "Q4_K": (4, 32, torch.float32, True),
    "Q2_K": (2, 16, torch.float32, True),
    "Q6_K": (6, 16, torch.float32, False),
    "IQ4": (4, 32, torch.float32, False),
    "NVFP4": (4, 16, torch.float32, False),
    "MXFP4": (4, 32, torch.uint8, False),
    "FP8": (8, 128, torch.float32, False),
}


def example(name: str) -> QTensor:
    bits, group, dtype, biased = FORMATS[name]
    scales = torch.ones(1, 1, dtype=dtype)
    width = max(group, 32)
    shape = (1, width // group)
    made = scales.expand(shape).contiguous()
    return QTensor(
        torch.zeros(1, width * bits // 32, dtype=torch.int32), made, made if biased else None, bits, group, (1, width)
    )


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("family", OPS)
def test_every_route_states_a_speed_or_calls_other_tables(family: str, backend: str):
    if backend == "cuda":
        pytest.importorskip("triton", reason="triton is not installed")
    table = routes_of(OPS[family], backend)
    assert table is not None
    assert [route.name for route in table if (route.speed is None) == (route.then is None)] in ([], ["nothing to multiply"])


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(1024, 4096), (16, 512, 1024)], ids=["matrix", "experts"])
def test_every_format_is_dequantized_in_registers_for_one_token(name: str, backend: str, shape: tuple[int, ...]):
    if backend == "cuda":
        pytest.importorskip("triton", reason="triton is not installed")
    weight = fake_weight(example(name).interleave(ISA.lanes if backend == "cpu" else 1), shape)
    assert tuple(weight.shape) == shape
    one, many = (speed_of(weight, tokens, backend) for tokens in (1, 2048))
    assert one.method.startswith("dequantized in registers")
    assert many.method != NO_KERNEL


def test_fp8_has_float_activations_on_cpu_and_a_dense_weight_is_dense():
    fp8 = speed_of(fake_weight(example("FP8").interleave(ISA.lanes), (64, 256)), 1, "cpu")
    four = speed_of(fake_weight(example("4 bits").interleave(ISA.lanes), (64, 256)), 1, "cpu")
    assert ("half-precision" if ISA.half_products else "float32") in fp8.method
    with exact():
        assert "float32" in speed_of(fake_weight(example("FP8").interleave(ISA.lanes), (64, 256)), 1, "cpu").method
    assert "int8" in four.method
    assert speed_of(torch.empty(64, 256), 1, "cpu").method.startswith("dense")


def test_a_width_without_groups_is_dense():
    assert isinstance(fake_weight(quantize(torch.randn(2, 64), 4, 64), (4, 96)), torch.Tensor)
