"""One token times codes in integers: Triton's interpreter, and PTX on numpy, as `tests/emulator` runs it."""

from typing import Any

import numpy as np
import pytest
import torch

from auraflux.ops._cases import relative_rms
from auraflux.quant import QTensor, affine, quantize

pytest.importorskip("triton")
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from auraflux.ops.gpu.blocks.codes import constants, operands
from auraflux.ops.gpu.device import INTERPRETED
from auraflux.ops.linear.cuda.matvec.any_format import Biased
from auraflux.ops.linear.cuda.matvec.integer import matvec_integer, matvec_integer_gated
from tests.emulator.ptx import Device, Machine
from tests.ops.gpu.test_cuda import _sound_interpreter  # noqa: F401

F16, F32 = torch.float16, torch.float32
# bits, group, kind, dtype of scales
FORMATS = [
    (3, 16, "centred", F32), (6, 16, "centred", F32), (4, 32, "iq4", F32), (4, 32, "iq4_nl", F32), (4, 16, "nvfp4", F32),
    (2, 16, "affine", F32),
    (4, 32, "affine", F32), (5, 32, "affine", F32), (8, 32, "affine", F16), (2, 128, "affine", F16), (3, 64, "affine", F16),
    (6, 64, "affine", F32), (4, 128, "affine", F16),
]  # fmt: skip
pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled for the GPU here"),
    pytest.mark.usefixtures("emulated"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
TOL = 1e-4  # of few results, which may be smaller than what they are summed of
KINDS = {tl.int32: np.int32, tl.float32: np.float32}


def weight_of(rows: int, width: int, bits: int, group: int, kind: str, scales: torch.dtype) -> QTensor:
    numbers = torch.randn(rows, width).to(scales)
    if group == 16 and kind == "affine":
        return QTensor(*affine.encode(numbers, bits, group), bits, group, (rows, width))
    return quantize(numbers, bits, group, kind)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, _sound_interpreter: None) -> None:  # noqa: F811
    """Let the interpreter run PTX."""

    def run(text: str, registers: str, args: Any, dtype: tuple[Any, ...], is_pure: bool, pack: int) -> tuple[Any, ...]:
        values = [np.asarray(arg.handle.data) for arg in args]
        machine = Machine(Device(), values[0].size // 32)
        kinds = tuple(KINDS[kind] for kind in dtype)
        found = machine.inline_asm_elementwise(str(text), str(registers), values, kinds, is_pure, pack)
        return tuple(tensor(np.asarray(value), kind) for value, kind in zip(found, dtype, strict=True))

    def tensor(value: np.ndarray, kind: Any) -> Any:
        return tl.core.tensor(TensorHandle(value, kind), tl.block_type(kind, list(value.shape)))

    monkeypatch.setattr(tl, "inline_asm_elementwise", run)


def product(x: torch.Tensor, weight: QTensor) -> torch.Tensor:
    return (x.double() @ weight.dequantize(torch.float32).double().T).float()


def multiply(x: torch.Tensor, weights: list[QTensor], more: torch.Tensor | None, block: int, warps: int = 1) -> list:
    """Run every program of `matvec_integer` over some weights."""
    width = x.shape[1]
    outs = [torch.full((1, weight.shape[0]), float("nan")) for weight in weights]
    products = tuple(Biased(operands(each), more, out, out.shape[1]) for each, out in zip(weights, outs, strict=True))
    shape = {"EVEN": width % (1024 * warps) == 0, "UNITS": 32 * warps, "ROWS": block, "EARLY": False}
    programs = sum(-(-out.shape[1] // block) for out in outs)
    matvec_integer[(programs,)](x, products, len(products), width, **constants(weights[0]), **shape)
    return outs


@pytest.mark.parametrize(("rows", "width"), [(5, 1152), pytest.param(4, 2048, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("bits", "group", "kind", "scales"), FORMATS)
def test_one_token(bits: int, group: int, kind: str, scales: torch.dtype, rows: int, width: int):
    torch.manual_seed(0)
    weight, x = weight_of(rows, width, bits, group, kind, scales), torch.randn(1, width).bfloat16()
    (found,) = multiply(x, [weight], None, 4)
    assert relative_rms(found, product(x, weight)) < TOL


def test_several_weights_with_biases():
    torch.manual_seed(0)
    weights = [weight_of(rows, 384, 6, 16, "centred", F32) for rows in (5, 2, 4)]
    x, more = torch.randn(1, 384).bfloat16(), torch.randn(5)
    for found, weight in zip(multiply(x, weights, more, 2), weights, strict=True):
        assert relative_rms(found, product(x, weight) + more[: weight.shape[0]]) < TOL


def test_gated():
    torch.manual_seed(0)
    gate, up = (weight_of(3, 384, 4, 16, "nvfp4", F32) for _ in range(2))
    x, out = torch.randn(1, 384).bfloat16(), torch.full((1, 3), float("nan"))
    matvec_integer_gated[(2,)](
        x, (operands(gate), operands(up)), out, 3, 384, **constants(gate), EVEN=False, UNITS=32, ROWS=2, EARLY=False
    )
    assert relative_rms(out, torch.nn.functional.silu(product(x, gate)) * product(x, up)) < TOL


def test_inputs_far_out():
    """Inputs that are large, tiny, zero in a whole unit, larger than their neighbours, or not finite."""
    torch.manual_seed(0)
    weight, x = weight_of(4, 512, 3, 16, "centred", F32), torch.randn(1, 512)
    x[:, 32:64], x[:, 70], x[:, 100] = 0, 3e4, 1e-30
    x[:, 128:256] *= 1e30
    x[:, 256:] *= 1e-30
    for some in (slice(0, 128), slice(128, 256), slice(256, 512)):
        part = torch.zeros_like(x)
        part[:, some] = x[:, some]
        part = part.bfloat16()
        # neighbours of an input that is 30000 times as large are rounded to integers
        assert relative_rms(multiply(part, [weight], None, 4)[0], product(part, weight)) < TOL
    for value in (float("nan"), float("inf")):
        x[:, 300] = value
        assert multiply(x.bfloat16(), [weight], None, 4)[0].isnan().all()
