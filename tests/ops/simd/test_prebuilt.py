"""Prebuilt kernels: loaded instead of compiled, and only those of these sources, versions and processor."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
import pytest

from auraflux.ops.simd.compile import cache_folder, prebuilt
from auraflux.ops.simd.compile.levels import LEVELS, Level, level_for
from auraflux.ops.simd.compile.prebuilt import PACKAGE, Prebuilt, folder_name, installed_for
from auraflux.ops.simd.isa import ISA, ISAS
from auraflux.ops.simd.jit import Kernel, arguments, int64s
from auraflux.ops.simd.processor import OPTIONAL, cpu_features, has_feature, machine

ALL = [level for levels in LEVELS.values() for level in levels]


def adding(number: int) -> Kernel:
    """Return a kernel that adds a number to an integer."""

    @Kernel
    def add(args, job, jobs):
        (target,) = arguments(args, 1)
        int64s(target, 1)[0] += number

    return add


def allocating() -> Kernel:
    """Return a kernel that adds 12 to an integer, by way of memory from Numba's runtime."""

    @Kernel
    def add(args, job, jobs):
        (target,) = arguments(args, 1)
        count = int64s(target, 1)[0] + 3
        fours = np.empty(count, np.int64)
        for i in range(count):
            fours[i] = 4
        for i in range(count):
            int64s(target, 1)[0] += fours[i]

    return add


def result(kernel: Kernel) -> int:
    value = np.zeros(1, np.int64)
    kernel(1, value.ctypes.data)
    return int(value[0])


@pytest.fixture
def level() -> Level:
    """Return a level of this processor; kernels are compiled for it natively."""
    return Level("test", ISA.name, "", ())


@pytest.fixture
def built(tmp_path: Path, level: Level, monkeypatch: pytest.MonkeyPatch) -> Prebuilt:
    """Build kernels that add 1, 2 and 12, and make them the prebuilt ones; there is no JIT cache."""
    monkeypatch.setattr(cache_folder, "CACHE_FOLDER", "")
    monkeypatch.setattr(cache_folder, "PREBUILT", Prebuilt(tmp_path / "made", level, is_written=True))
    for kernel in (adding(1), adding(2), allocating()):
        kernel.compile()
    found = Prebuilt(tmp_path / "made", level)
    monkeypatch.setattr(cache_folder, "PREBUILT", found)
    return found


def is_loaded(kernel: Kernel) -> bool:
    """Return whether a kernel's code is loaded and not compiled."""
    kernel.compile()
    return kernel._compiled.cache_hits == 1


def test_prebuilt_kernels_are_loaded(built: Prebuilt):
    assert len(list(built.folder.iterdir())) == 3
    for number in (1, 2):
        kernel = adding(number)
        assert kernel.is_cached()
        assert is_loaded(kernel)
        assert result(kernel) == number
    # a variant that is not there is compiled
    assert not adding(3).is_cached()
    assert not is_loaded(adding(3))
    assert result(adding(3)) == 3
    assert len(list(built.folder.iterdir())) == 3


def test_prebuilt_kernels_serve_other_processes(built: Prebuilt):
    code = f"""
from pathlib import Path
from auraflux.ops.simd.compile import cache_folder
from auraflux.ops.simd.compile.levels import Level
from auraflux.ops.simd.compile.prebuilt import Prebuilt
cache_folder.CACHE_FOLDER, cache_folder.PREBUILT = "", Prebuilt(Path({str(built.folder)!r}), Level("test", "", "", ()))
from tests.ops.simd.test_prebuilt import adding, allocating, is_loaded, result
print(is_loaded(adding(2)), result(adding(2)), is_loaded(allocating()), result(allocating()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert (done.stdout, done.stderr) == ("True 2 True 12\n", "")


@pytest.mark.parametrize("damage", [b"", b"x" * 100], ids=["empty", "foreign"])
def test_corrupt_entry_is_compiled_again(built: Prebuilt, damage: bytes):
    for path in built.folder.iterdir():
        path.write_bytes(damage)
    assert not is_loaded(adding(1))
    assert result(adding(1)) == 1


def test_kernel_over_a_function_without_description_is_compiled(built: Prebuilt, monkeypatch: pytest.MonkeyPatch):
    def refuse(value: Any) -> str:
        raise TypeError("no plain value")

    monkeypatch.setattr(prebuilt, "_described", refuse)
    assert not adding(1).is_cached()
    assert not is_loaded(adding(1))


def test_only_kernels_of_these_sources_and_versions_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prebuilt.config, "CPU_NAME", None)
    monkeypatch.setattr(prebuilt.config, "CPU_FEATURES", None)
    level = level_for(LEVELS.get(machine(), ()), ISA.name, cpu_features())
    if level is None:
        pytest.skip("there is no level for this processor")
    assert installed_for("sources", tmp_path) is None
    (tmp_path / PACKAGE / folder_name("sources", level)).mkdir(parents=True)
    found = installed_for("sources", tmp_path)
    assert found is not None
    assert found.level is level
    assert installed_for("others", tmp_path) is None
    for package in (numba, llvmlite):
        with monkeypatch.context() as patch:
            patch.setattr(package, "__version__", "0.1")
            assert installed_for("sources", tmp_path) is None
    for name in ("CPU_NAME", "CPU_FEATURES"):
        with monkeypatch.context() as patch:
            patch.setattr(prebuilt.config, name, "generic")
            assert installed_for("sources", tmp_path) is None


@pytest.mark.parametrize("level", ALL, ids=lambda level: level.name)
def test_level_serves_the_processors_with_its_features(level: Level):
    [levels] = [levels for levels in LEVELS.values() if level in levels]
    features = {*level.features, *ISAS[level.isa].features}
    assert {*ISAS[level.isa].features} <= {*level.features}
    assert level_for(levels, level.isa, features) is level
    # features that no kernel uses change nothing; those that kernels would use and the level lacks do
    assert level_for(levels, level.isa, features | {"sgx"}) is level
    for name in {*OPTIONAL} - {*level.features}:
        assert level_for(levels, level.isa, features | {name}) is not level
    for name in level.features:
        assert level_for(levels, level.isa, features - {name}) is not level
    assert level_for(levels, "portable", features) is None


def test_kernels_ask_for_declared_features_only():
    with pytest.raises(AssertionError, match="avx999 is not in OPTIONAL"):
        has_feature("avx999")


def test_names_of_machine_code_differ_between_processes():
    code = """
import os
from numba.core.bytecode import FunctionIdentity
import auraflux.ops.simd.compile.compiler
print(next(FunctionIdentity._unique_ids), flush=True)
if os.fork() == 0:
    print(next(FunctionIdentity._unique_ids), flush=True)
    os._exit(0)
os.wait()
print(next(FunctionIdentity._unique_ids))
"""
    lines = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() for _ in range(2)]
    [first, child, second], other = (list(map(int, each)) for each in lines)
    assert second == first + 1
    assert len({first, child, *other}) == 5
