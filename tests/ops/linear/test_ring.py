"""One token times wide weights on Hopper by TMA rings: on numpy, and on the GPU in a supported size."""

import pytest
import torch

from auraflux.ops._cases import relative_rms
from auraflux.ops._gpu_inputs import codes
from auraflux.ops.explain import taken
from auraflux.ops.linear.reference import add_norm_gate_up, linear
from auraflux.ops.routes import explain_call

pytest.importorskip("triton")
from auraflux.ops.linear.cuda.matvec.int4_tma import matvec_ring
from tests.emulator.experts import RingMachine, placed
from tests.emulator.ptx import Device

TOL = 4e-3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("width", "rows", "programs", "warps", "deep"),
    # fewer inputs than warps could have, as many, some warps with more than others
    [(512, 48, 4, 2, 2), (1024, 64, 3, 2, 2), (2560, 32, 2, 4, 2)],
)
def test_stages_of_rows_are_multiplied(width: int, rows: int, programs: int, warps: int, deep: int):
    torch.manual_seed(width)
    weight, x, device = codes(rows, width, bits=4), torch.randn(1, width).bfloat16(), Device()
    out = torch.full((1, rows), float("nan")).bfloat16()
    arrays = [placed(device, one) for one in (x, weight.packed, weight.scales, weight.biases, out)]
    for program in range(programs):
        machine = RingMachine(device, warps, programs, program)
        kernel = machine.program(matvec_ring, count_read=machine.count_read, await_stage=lambda *args: None)
        kernel(*arrays, rows, width, -(-rows // 8 // programs), deep, warps)
    assert arrays[-1] is not None
    assert relative_rms(device.get(arrays[-1], out).float(), linear.reference(x.float(), weight)) <= TOL


@pytest.mark.gpu
def test_wide_weights_on_the_gpu():
    from auraflux.ops.gpu.device import multiprocessors
    from auraflux.ops.linear.cuda.matvec.int4_tma import refuses

    torch.manual_seed(7)
    with torch.device("cuda"):
        weight, x = codes(7168, 16384, bits=4), torch.randn(1, 16384).bfloat16()
        assert refuses(weight, multiprocessors(x.device)) is None
        found, expected = linear(x, weight), linear.reference(x.float(), weight)
        assert relative_rms(found.float(), expected) <= TOL
        for _ in range(5):
            assert torch.equal(linear(x, weight), found)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2048, 4096])
def test_tiles_in_a_loop_on_the_gpu(width: int):
    torch.manual_seed(width)
    with torch.device("cuda"):
        x, delta = (torch.randn(1, width).bfloat16() for _ in range(2))
        norm, gate, up = torch.rand(width) + 0.5, codes(14336, width, bits=4), codes(14336, width, bits=4)
        wide = codes(32000, width, bits=4)
    calls = (
        (linear, {"x": x, "weight": wide}),
        (add_norm_gate_up, {"x": x, "delta": delta, "norm": norm, "eps": 1e-6, "gate": gate, "up": up}),
    )
    for op, args in calls:
        verdict = explain_call(op, "cuda", args)
        assert verdict is not None
        assert "matvec_int4_loop" in taken(verdict)
        found, expected = op(**args), op.reference(**args)
        for mine, theirs in zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]:
            assert relative_rms(mine.float(), theirs.float()) <= 2 * TOL
