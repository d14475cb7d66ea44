"""Inner loops of CPU kernels compiled for ARM and run by qemu."""

import os
import subprocess
import sys

import pytest

from auraflux.ops.simd import processor
from auraflux.ops.simd.isa import _choose
from tests.arm.emulator import missing


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}")
@pytest.mark.parametrize("name", ["neoverse-n1", "apple-m1", "neoverse-v1"])
def test_inner_loops_agree_with_numpy(name: str):
    command = [sys.executable, "-m", "tests.arm", name]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(processor.machine() != "aarch64", reason="needs LLVM on ARM")
@pytest.mark.parametrize(
    ("name", "isa"),
    [
        ("cortex-a72", "portable"),
        ("neoverse-n1", "neon-dotprod"),
        ("apple-m1", "neon-dotprod"),
        ("neoverse-v1", "neon-i8mm"),
        ("apple-m2", "neon-i8mm"),
        ("ampere1", "neon-dotprod"),
    ],
)
def test_the_best_instruction_set_is_chosen(name: str, isa: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AURAFLUX_ISA", raising=False)
    monkeypatch.setattr(processor.config, "CPU_NAME", name)
    monkeypatch.setattr(processor.config, "CPU_FEATURES", "+neon")
    assert _choose().name == isa
