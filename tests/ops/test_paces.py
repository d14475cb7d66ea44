"""What is said of a format's speed is said of every route, and asked of the tables."""

import pytest
import torch

from auraflux.ops import exact
from auraflux.ops.linear.reference import linear
from auraflux.ops.moe.reference import expert_mlp
from auraflux.ops.paces import CODES, NO_KERNEL, PACES, WITHOUT, pace_of, unfilled
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
@pytest.mark.parametrize("family", PACES)
def test_every_route_has_a_pace_or_hands_on(family: str, backend: str):
    if backend == "cuda":
        pytest.importorskip("triton", reason="triton is not installed")
    table = routes_of(OPS[family], backend)
    assert table is not None
    names = {route.name for route in table}
    # on a CPU routes of codes ask for a driver
    drivers = set(CODES) if backend == "cpu" else set()
    assert names | drivers == set(PACES[family][backend]) | names & WITHOUT


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(1024, 4096), (16, 512, 1024)], ids=["matrix", "experts"])
def test_codes_of_every_format_are_read_as_they_are(name: str, backend: str, shape: tuple[int, ...]):
    if backend == "cuda":
        pytest.importorskip("triton", reason="triton is not installed")
    weight = unfilled(example(name).interleave(ISA.lanes if backend == "cpu" else 1), shape)
    assert tuple(weight.shape) == shape
    one, many = (pace_of(weight, tokens, backend) for tokens in (1, 2048))
    assert one.does.startswith("codes are read as they are")
    assert many.does != NO_KERNEL


def test_fp8_is_met_by_floats_on_a_cpu_and_a_dense_weight_is_dense():
    fp8 = pace_of(unfilled(example("FP8").interleave(ISA.lanes), (64, 256)), 1, "cpu")
    four = pace_of(unfilled(example("4 bits").interleave(ISA.lanes), (64, 256)), 1, "cpu")
    assert ("half precision" if ISA.half_products else "float32") in fp8.does
    with exact():
        assert "float32" in pace_of(unfilled(example("FP8").interleave(ISA.lanes), (64, 256)), 1, "cpu").does
    assert "int8" in four.does
    assert pace_of(torch.empty(64, 256), 1, "cpu").does.startswith("read as they are")


def test_a_width_without_groups_is_dense():
    assert isinstance(unfilled(quantize(torch.randn(2, 64), 4, 64), (4, 96)), torch.Tensor)
