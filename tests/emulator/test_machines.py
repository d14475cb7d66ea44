"""The emulators themselves: memory outside of tensors cannot be accessed, and instructions behave as NVIDIA documents."""

import numpy as np
import pytest
import torch

from tests.emulator.gluon import Pointer, Program
from tests.emulator.ptx import Device, Lanes, Machine
from tests.emulator.threads import narrow, widen


def asm(machine: Machine, text: str, registers: str, *args: np.ndarray) -> np.ndarray:
    return np.asarray(machine.inline_asm_elementwise(text, registers, [arg.view(Lanes) for arg in args], np.int32, True, 1))


def test_memory_outside_of_tensors_cannot_be_read():
    device = Device()
    at = device.put(torch.arange(8, dtype=torch.int32))
    assert at is not None
    device.check(at.at, 32)
    with pytest.raises(AssertionError):
        device.check(at.at, 36)
    memory = Pointer(np.arange(4))
    assert (Program.load(memory + Program.arange(0, 6), mask=np.arange(6) < 4, other=9).data == [0, 1, 2, 3, 9, 9]).all()
    with pytest.raises(AssertionError, match="outside"):
        Program.load(memory + 4)


def test_tensors_round_trip_through_the_device():
    device, x = Device(), torch.randn(3, 5).bfloat16()
    at = device.put(x)
    assert at is not None
    assert torch.equal(device.get(at, x), x)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("lop3.b32 $0,$1,$2,0,0xc0;", 0b1000),
        ("lop3.b32 $0,$1,$2,0,0xfc;", 0b1110),
        ("prmt.b32 $0,$1,$2,0x0004;", 0x0A0A0A0C),
        ("shf.r.wrap.b32 $0,$1,$2,1;", 0b101),
    ],
)
def test_instructions(text: str, found: int):
    machine = Machine(Device(), 1, 0)
    a, b = (np.full(32, value, np.int32) for value in (0b1010, 0b1100))
    assert (asm(machine, text, "=r,r,r", a, b) == found).all()


def test_lanes_exchange_values():
    machine = Machine(Device(), 2, 0)
    lanes = np.arange(64, dtype=np.int32)
    found = asm(machine, "shfl.sync.bfly.b32 $0,$1,4,31,0xffffffff;", "=r,r", lanes)
    assert (found == (lanes ^ 4)).all()


def test_bfloat16_is_rounded_to_even():
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    assert (widen(narrow(values)) == torch.from_numpy(values).bfloat16().float().numpy()).all()


def test_an_unknown_instruction_fails():
    with pytest.raises(AssertionError, match="vabsdiff"):
        asm(Machine(Device(), 1, 0), "vabsdiff.u32 $0,$1;", "=r,r", np.zeros(32, np.int32))
