"""Functions of `ops/hopper` of one or few instructions, on numpy: each does what its docstring says."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import auraflux.ops.gpu.blocks
import auraflux.ops.hopper
from auraflux.ops.hopper import ptx
from tests.emulator.hopper import Hopper, functions
from tests.emulator.ptx import Device
from tests.emulator.rebind import rebound
from tests.emulator.threads import narrow, widen

FOLDERS = [Path(package.__file__).parent for package in (auraflux.ops.hopper, auraflux.ops.gpu.blocks)]
# what kernels are made of; the other modules are of the host
GLUON = ("ptx", "shared_memory", "reduce", "copy", "mma", "mma_int4", "mma_int4_groups", "mma_bits", "mma_int8")
TRITON = ("codes", "softmax", "flash", "split_kv", "pages", "rope", "elementwise")


def public(name: str) -> dict[str, str | None]:
    """Return the functions of a module that kernels call, and their docstrings."""
    [path] = [folder / f"{name}.py" for folder in FOLDERS if (folder / f"{name}.py").exists()]
    found = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_docstring(node) for node in found if not node.name.startswith("_")}


@pytest.mark.parametrize("name", GLUON + TRITON)
def test_every_function_has_a_contract_of_one_line(name: str):
    assert [
        function for function, text in public(name).items() if not text or not text.split("\n")[0].endswith((".", ";", ":"))
    ] == []


@pytest.fixture
def machine() -> Hopper:
    return Hopper(warps=2)


@pytest.fixture
def made(machine: Hopper) -> dict:
    return functions(machine)


def test_words_of_other_lanes_are_of_the_same_warp(machine: Hopper, made: dict):
    found = made["from_lane"](machine.tid * 10, machine.lanes(5))
    assert found.tolist() == [50] * 32 + [370] * 32


def test_run_needs_no_result(machine: Hopper, made: dict):
    for name in ("SYNC", "WAIT", "LAUNCH", "WAIT_AND_LAUNCH"):
        assert made["run"](made[name], machine.tid) is None


def test_shared_memory_is_declared_by_a_store_behind_what_the_kernel_uses():
    class Memory:
        def __init__(self, row: int | None = None):
            self.row, self.stored = row, []

        def index(self, row: int) -> "Memory":
            return Memory(row)

        def slice(self, start: int, length: int) -> "Memory":
            rows.append((self.row, start, length))
            return self

        def store(self, values: np.ndarray) -> None:
            rows.append(len(values))

    class Allocating(Hopper):
        SwizzledSharedLayout = staticmethod(lambda *args: None)

        def allocate_shared_memory(self, dtype: type, shape: list[int], layout: None) -> Memory:
            rows.append(tuple(shape))
            return Memory()

    rows: list = []
    machine = Allocating(warps=2)
    memory, base = rebound(ptx.shared, machine)(5000, machine.tid)
    ((count, width), (row, _, length), stored) = rows
    assert isinstance(memory, Memory)
    assert set(base.tolist()) == {machine.segment}
    assert row * width >= 5000
    assert row < count
    assert length == stored == 64


def test_bf16_of_words_are_widened(machine: Hopper, made: dict):
    numbers = np.array([1.5, -2.0, 3e38, -0.0], np.float32)
    bits = int.from_bytes(narrow(numbers).tobytes(), "little")
    word = machine.lanes(np.uint64(bits).astype(np.int64), np.int64)
    for j, number in enumerate(widen(narrow(numbers))):
        assert (np.asarray(made["bf16_at"](word, j)) == number).all()


def test_values_stored_in_shared_memory_are_loaded(machine: Hopper, made: dict):
    tid, there = machine.tid, machine.tid % 2 == 0
    real = machine.lanes(np.arange(64) - 7.5, np.float32)
    made["put_word"](tid * 4, tid - 100)
    assert made["word_at"](tid * 4).tolist() == list(range(-100, -36))
    made["put"](tid * 4, real)
    assert made["float_at"](tid * 4, there).tolist() == [x if i % 2 == 0 else 0 for i, x in enumerate(real.tolist())]
    made["put_float"](tid * 4, real * 2, there)
    assert made["float_at"](tid * 4, tid >= 0).tolist() == [x * (2 - i % 2) for i, x in enumerate(real.tolist())]
    made["put_two"](tid * 8, tid, -tid, tid >= 0)
    made["put_two"](tid * 8, tid * 0, tid * 0, there)
    assert made["word_at"](tid * 8 + 4).tolist() == [-i * (i % 2) for i in range(64)]
    made["put_long"](tid * 8, machine.lanes((np.arange(64) << 33) + 1, np.int64), tid >= 0)
    assert made["long_at"](tid * 8).tolist() == [(i << 33) + 1 for i in range(64)]


def test_several_numbers_are_stored_and_loaded_together(machine: Hopper, made: dict):
    tid = machine.tid
    real = [machine.lanes(np.arange(64) + 0.25 * j, np.float32) for j in range(4)]
    made["put_four_floats"](tid * 16, real)
    assert [x.tolist() for x in made["four_floats_at"](tid * 16)] == [x.tolist() for x in real]
    assert [x.tolist() for x in made["float_pair_at"](tid * 16 + 8)] == [x.tolist() for x in real[2:]]
    made["put_float_pair"](tid * 8, real[1], real[3])
    assert [x.tolist() for x in made["float_pair_at"](tid * 8)] == [real[1].tolist(), real[3].tolist()]
    words = [tid * 4 + j for j in range(4)]
    made["put_four_words"](tid * 16, words)
    assert [x.tolist() for x in made["four_words_at"](tid * 16)] == [x.tolist() for x in words]


def test_halves_of_words_are_loaded(machine: Hopper, made: dict):
    numbers = np.array([0.5, -3.0], np.float32)
    made["put_word"](machine.tid * 4, machine.lanes(narrow(numbers).view(np.int32)[0]))
    assert set(made["half_at"](machine.tid * 4 + 2).tolist()) == {-3.0}
    assert set(made["short_at"](machine.tid * 4).tolist()) == {int(narrow(numbers)[0])}


def test_counters_return_the_previous_count(machine: Hopper, made: dict):
    made["put_word"](machine.tid * 4, machine.tid * 0)
    found = made["atomic_increment"](machine.tid % 2 * 4, machine.tid % 4 < 2)
    mine = np.asarray(found).reshape(-1, 4)
    assert sorted(mine[:, 0].tolist()) == sorted(mine[:, 1].tolist()) == list(range(16))
    assert not mine[:, 2:].any()
    assert made["word_at"](machine.tid % 2 * 4).tolist() == [16] * 64


@pytest.mark.parametrize("lanes", [2, 4, 8, 32])
def test_sums_over_neighbouring_lanes_are_identical_in_all(lanes: int, machine: Hopper, made: dict):
    values = machine.lanes(np.random.default_rng(lanes).normal(size=64), np.float32)
    found = np.asarray(made["sum_over"](values, lanes)).reshape(-1, lanes)
    np.testing.assert_allclose(found[:, 0], np.asarray(values).reshape(-1, lanes).sum(1), rtol=1e-5, atol=1e-6)
    assert (found == found[:, :1]).all()


def test_four_lanes_are_summed(machine: Hopper, made: dict):
    found = made["sum_four"](machine.lanes(np.arange(64), np.float32))
    assert found.tolist() == [sum(range(i // 4 * 4, i // 4 * 4 + 4)) for i in range(64)]


def test_integers_are_reduced_over_a_warp(machine: Hopper, made: dict):
    values = machine.lanes((np.arange(64) * 37 + 11) % 64 - 30)
    warps = np.asarray(values).reshape(2, 32)
    for name, wanted in (("highest", warps.max(1)), ("lowest", warps.min(1)), ("sum_int", warps.sum(1))):
        assert made[name](values).tolist() == np.repeat(wanted, 32).tolist()
    assert made["any_bits"](1 << machine.tid % 5).tolist() == [31] * 64
    assert made["count_true"](machine.tid % 3 == 0).tolist() == [11] * 32 + [11] * 32
    assert made["warp_uniform"](machine.lanes(-4)).tolist() == [-4] * 64


def test_running_sums_begin_anew_with_each_warp(machine: Hopper, made: dict):
    found = np.asarray(made["inclusive_scan"](machine.tid - 3)).reshape(2, 32)
    assert (found == np.cumsum(np.arange(64).reshape(2, 32) - 3, 1)).all()


@pytest.mark.parametrize("nbytes", [4, 8, 16])
def test_copies_take_what_is_there(nbytes: int):
    device = Device()
    source = torch.arange(1024, dtype=torch.int32)
    at = device.put(source)
    assert at is not None
    machine = Hopper(device)
    made = functions(machine)
    machine.memory[: 32 * nbytes] = 0xEE
    place = machine.lanes(at.at[0] + np.arange(32)[::-1] * nbytes, np.int64)
    made["copy"](made["copy_ptx"](nbytes), machine.tid * nbytes, place, machine.tid < 20)
    made["run"](made["COMMIT"], machine.tid)
    made["run"](made["wait_ptx"](0), machine.tid)
    made["run"](made["WAIT_ALL"], machine.tid)
    found = machine.memory[: 32 * nbytes].reshape(32, nbytes)
    assert (found[:20] == source.numpy().view(np.uint8)[: 32 * nbytes].reshape(32, nbytes)[::-1][:20]).all()
    assert (found[20:] == 0xEE).all()


def test_only_sixteen_bytes_pass_by_the_first_cache(made: dict):
    assert {size: "cp.async.cg" in made["copy_ptx"](size) for size in (4, 8, 16)} == {4: False, 8: False, 16: True}
    assert made["COPY8"] == made["copy_ptx"](8)
    assert made["COPY16"] == made["copy_ptx"](16)


def test_threads_copy_together(machine: Hopper, made: dict):
    source = torch.arange(700, dtype=torch.int32)
    at = machine.device.put(source)
    machine.memory[:4096] = 0
    made["copy_together"](machine.lanes(0), machine.lanes(at.at[0], np.int64), machine.tid, 2800, 64)
    made["run"](made["WAIT_ALL"], machine.tid)
    assert machine.memory[:2800].view(np.int32).tolist() == source.tolist()
    assert not machine.memory[2800:4096].any()
    made["copy_together"](machine.lanes(2800), machine.lanes(0, np.int64), machine.tid, 1024, 64)
    made["run"](made["WAIT_ALL"], machine.tid)
    assert not machine.memory[2800:4096].any()


def test_packed_products_are_replaced_where_there_are_none():
    text = "{mul.rn.bf16x2 $0,$1,$2; min.u16x2 $0,$0,$3; @p max.u16x2 $1,$2,$3; add.u32 $0,$0,$1;}"
    assert ptx.with_older_instructions(text, True) == text
    older = ptx.with_older_instructions(text, False)
    assert "mul.rn.bf16x2" not in older
    assert "u16x2" not in older
    # a product plus -0 is the product, and -0 where that is -0
    for each in (
        "mov.b32 minus,0x80008000",
        "fma.rn.bf16x2 $0,$1,$2,minus",
        "vmin2.u32.u32.u32 $0,$0,$3,zero",
        "@p vmax2.u32.u32.u32 $1,$2,$3,zero",
        "add.u32 $0,$0,$1",
    ):
        assert each in older


BARRIERS = 4096


def test_threads_wait_for_the_bytes_of_every_phase():
    device = Device()
    source = torch.arange(512, dtype=torch.int32)
    at = device.put(source)
    assert at is not None
    machine = Hopper(device)
    made, tid = functions(machine), machine.tid
    made["init_barriers"](machine.lanes(BARRIERS), tid, 2)
    assert sorted(machine.barriers) == [BARRIERS, BARRIERS + 8]
    for phase in range(3):
        with pytest.raises(AssertionError, match="wait forever"):
            made["await_stage"](machine.lanes(BARRIERS + 8), machine.lanes(phase), tid >= 0)
        made["await_stage"](machine.lanes(BARRIERS + 8), machine.lanes(phase), tid < 0)
        made["expect"](machine.lanes(BARRIERS + 8), machine.lanes(64), tid == 0)
        place = machine.lanes(at.at[0] + 256 * phase + 16 * np.arange(32), np.int64)
        made["tma_copy"](tid * 16, place, machine.lanes(16), machine.lanes(BARRIERS + 8), tid < 4)
        made["await_stage"](machine.lanes(BARRIERS + 8), machine.lanes(phase), tid >= 0)
        assert machine.memory[:64].view(np.int32).tolist() == list(range(64 * phase, 64 * phase + 16))
    made["expect"](machine.lanes(BARRIERS), machine.lanes(0), tid == 3)
    made["await_bytes"](machine.lanes(BARRIERS))


def test_the_last_warp_that_has_read_a_stage_knows(machine: Hopper, made: dict):
    made["put_word"](machine.tid * 4, machine.tid * 0)
    there = machine.tid < 32
    assert made["count_read"](machine.lanes(8), machine.tid % 32, there).tolist() == [0] * 32 + [-1] * 32
    assert sorted(set(made["count_read"](machine.lanes(8), machine.tid % 32, machine.tid >= 0).tolist())) == [1, 2]


@pytest.mark.parametrize("name", GLUON)
def test_every_function_of_threads_is_tested(name: str):
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_hopper_*.py"))
    ptx = {function for function in public(name) if function.endswith(("_ptx", "_regs"))}  # PTX of the other functions
    named = set(re.findall(rf'"(\w+)"|\b{name}\.(\w+)', text))
    assert public(name).keys() - ptx - {either for pair in named for either in pair} == set()
