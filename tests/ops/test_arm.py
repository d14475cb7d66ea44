"""Inner loops of CPU kernels compiled for ARM and run by qemu; what llvm-mca is given of them."""

import os
import subprocess
import sys

import pytest

from auraflux.bench.cycles import hot_loop, products
from auraflux.ops.simd import processor
from auraflux.ops.simd.isa import _choose
from tests.arm.emulator import missing

ASSEMBLY = """
kernel:
.LBB0_1:
        ldr     q1, [x0]   // outer
.LBB0_2:
        sdot    v0.4s, v1.16b, v2.4b[0]
        b.lt    .LBB0_2
        str     q0, [x1]
        b.lo    .LBB0_1
        ret
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}")
@pytest.mark.parametrize("name", ["neoverse-n1", "apple-m1", "neoverse-v1"])
def test_inner_loops_agree_with_numpy(name: str):
    command = [sys.executable, "-m", "tests.arm", name]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_loop_within_a_loop_is_written_out():
    body = hot_loop(ASSEMBLY, 3)
    assert [line.split()[0] for line in body] == ["ldr", *["sdot", "b.lt"] * 3, "str", "b.lo"]
    assert sum(map(products, body)) == 48


def test_products_of_an_instruction():
    assert products("vpdpbusd\t(%rax), %zmm1, %zmm2") == 64
    assert products("vpmaddubsw\t%ymm0, %ymm1, %ymm2") == 32
    assert products("smmla\tv0.4s, v1.16b, v2.16b") == 32
    assert products("add\tx0, x0, #1") == 0


@pytest.mark.skipif(processor.machine() != "aarch64", reason="LLVM is asked about ARM on ARM only")
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
def test_a_processor_gets_its_best_instructions(name: str, isa: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AURAFLUX_ISA", raising=False)
    monkeypatch.setattr(processor.config, "CPU_NAME", name)
    monkeypatch.setattr(processor.config, "CPU_FEATURES", "+neon")
    assert _choose().name == isa
