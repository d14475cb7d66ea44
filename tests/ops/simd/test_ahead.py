"""Ahead-of-time compilation of CPU kernels."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import auraflux
from auraflux.errors import FormatError
from auraflux.ops import rms_norm, swiglu
from auraflux.ops.attention.cpu.page_index import survey
from auraflux.ops.simd.compile import ahead
from auraflux.ops.simd.compile.ahead import collect_kernels, compile_all
from auraflux.ops.simd.compile.cache_folder import CACHE_FOLDER

X, WEIGHT = torch.ones(1, 64), torch.full((64,), 2.0)


@pytest.fixture
def fresh(tmp_path: Path) -> dict[str, str]:
    """The environment of a process whose JIT cache has no kernel of an op, only the launch and the replay."""
    for found in (path for name in ("simd_*", "replay_*") for path in Path(CACHE_FOLDER).glob(name) if CACHE_FOLDER):
        to = tmp_path / "numba" / Path(CACHE_FOLDER).name / found.name
        # files that others write now are renamed when they are complete
        shutil.copytree(found, to, ignore=shutil.ignore_patterns("*.tmp.*"))
    for folder in (tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())):
        folder.chmod(0o700)
    return {**os.environ, "AURAFLUX_CACHE": str(tmp_path)}


def test_a_dry_run_collects_kernels_once_and_runs_none():
    with collect_kernels() as kernels:
        found = [rms_norm(X, WEIGHT, 1e-6) for _ in range(2)]
    assert len(kernels) == 1
    assert not any(each.any() for each in found)
    assert rms_norm(X, WEIGHT, 1e-6).allclose(WEIGHT)


def test_a_dry_run_does_not_affect_other_threads():
    found: list[torch.Tensor] = []
    with collect_kernels() as kernels:
        other = threading.Thread(target=lambda: found.append(rms_norm(X, WEIGHT, 1e-6)))
        other.start()
        other.join()
    assert not kernels
    assert found[0].allclose(WEIGHT)


def test_a_dry_run_collects_queries():
    index = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    table, lengths, starts = (each.data_ptr() for each in index)
    arguments = table, 1, lengths, starts, 1, 1, 16, 1, 0
    with collect_kernels() as kernels:
        assert survey.ask(*arguments) == 0
    assert list(kernels) == [survey]
    assert survey.ask(*arguments) == 1
    assert survey.is_cached()


def test_allocators_are_restored_after_a_dry_run():
    before = torch.empty, torch.empty_like, torch.Tensor.new_empty
    with pytest.raises(ZeroDivisionError), collect_kernels():
        1 / 0  # noqa: B018
    assert (torch.empty, torch.empty_like, torch.Tensor.new_empty) == before


def test_cached_kernels_are_not_compiled_again():
    swiglu(X, X)
    with collect_kernels() as kernels:
        swiglu(X, X)
    compiled: list[str] = []
    compile_all(kernels, lambda name, done, total: compiled.append(name))
    assert not compiled


BACKGROUND = """
import os, torch
from auraflux.ops import rms_norm, sigmoid_gate, swiglu
from auraflux.ops.simd.compile import ahead

x, weight = torch.ones(1, 64), torch.full((64,), 2.0)
os.sched_getaffinity = lambda pid: {0, 1}
with ahead.collect_kernels() as needed:
    rms_norm(x, weight, 1e-6)
with ahead.collect_kernels() as background:
    swiglu(x, x), sigmoid_gate(x, x)
for _ in range(3):
    # like models loaded one after the other on a busy machine
    ahead.compile_all(needed if NEEDED else [], lambda name, done, total: print(done, total), background)
assert len(ahead._background) <= 2
assert all(each.is_cached() for each in needed) is NEEDED
ahead.wait_for_background()
assert all(each.is_cached() for each in background)
assert rms_norm(x, weight, 1e-6).allclose(weight)
"""


@pytest.mark.parametrize("needed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_deferred_kernels_are_compiled_in_the_background(fresh: dict[str, str], needed: bool):
    code = BACKGROUND.replace("NEEDED", str(needed))
    done = subprocess.run([sys.executable, "-c", code], env=fresh, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("0 1\n1 1\n" if needed else "")


AHEAD = """
import os, torch
from auraflux.ops import rms_norm, sigmoid_gate, swiglu
from auraflux.ops.simd import jit
from auraflux.ops.simd.compile import ahead

x, weight = torch.ones(1, 64), torch.full((64,), 2.0)
os.sched_getaffinity = lambda pid: {0, 1}
with ahead.collect_kernels() as kernels:
    rms_norm(x, weight, 1e-6), swiglu(x, x), sigmoid_gate(x, x)
if KILLED:
    jit.Kernel.compile, compile = lambda self: os._exit(9) if os.getpid() != here else compile(self), jit.Kernel.compile
here = os.getpid()


# a process of an earlier call that gets no core
class Starved:
    def is_alive(self):
        return True

    def join(self):
        raise AssertionError("waited for a process of an earlier call")


ahead._background.append(Starved())
ahead.compile_all(kernels, lambda name, done, total: print(done, total))
assert len(ahead._background) == 1
assert all(each.is_cached() for each in kernels)
assert rms_norm(x, weight, 1e-6).allclose(weight)
"""


@pytest.mark.parametrize("killed", [False, True], ids=["parallel", "killed"])
def test_kernels_are_compiled_in_processes_or_here_if_those_fail(fresh: dict[str, str], killed: bool):
    code = AHEAD.replace("KILLED", str(killed))
    done = subprocess.run([sys.executable, "-c", code], env=fresh, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if not killed:
        assert done.stdout.split("\n")[-2] == "3 3"


EARLY = """
import os, torch
from auraflux.ops import rms_norm, sigmoid_gate, swiglu
from auraflux.ops.simd import threads
from auraflux.ops.simd.compile import ahead

x, weight = torch.ones(1, 64), torch.full((64,), 2.0)
os.sched_getaffinity = lambda pid: {0, 1}
kernels = []
for call in (lambda: rms_norm(x, weight, 1e-6), lambda: swiglu(x, x), lambda: sigmoid_gate(x, x)):
    with ahead.collect_kernels() as found:
        call()
    kernels += found
ahead.start_early(kernels[:1])
(early,) = ahead._early
if KILLED:
    early.process.kill()
wanted = kernels if WANTED else kernels[1:]

def overlap(pause):
    pause()
    assert wanted[-1].is_cached()
    print("overlap")

before = threads.threads(), torch.get_num_threads()
ahead.compile_all(wanted, first=wanted[-1:], overlap=overlap)
assert all(each.is_cached() for each in wanted)
assert (threads.threads(), torch.get_num_threads()) == before
early.process.join(60)
assert kernels[0].is_cached() is WANTED
assert not ahead._early
"""


@pytest.mark.parametrize(
    ("wanted", "killed"),
    [
        pytest.param(True, False, id="requested"),
        pytest.param(True, True, id="requested-killed"),
        pytest.param(False, False, id="unrequested"),
        pytest.param(False, True, id="unrequested-killed", marks=pytest.mark.slow),
    ],
)
def test_early_compilation_is_not_repeated(fresh: dict[str, str], wanted: bool, killed: bool):
    code = EARLY.replace("WANTED", str(wanted)).replace("KILLED", str(killed))
    done = subprocess.run([sys.executable, "-c", code], env=fresh, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "overlap\n"


def test_early_compilation_stops_if_the_model_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ended: list[str] = []
    process = SimpleNamespace(terminate=lambda: ended.append("early"))
    monkeypatch.setattr(ahead, "start_early", lambda kernels: ahead._early.append(ahead._EarlyCompile(kernels, process)))
    with pytest.raises(FormatError, match=r"no config\.json"):
        auraflux.load(tmp_path, device="cpu")
    assert ended == ["early"]
    assert not ahead._early


def test_an_error_in_overlapped_work_is_raised():
    with pytest.raises(ZeroDivisionError):
        compile_all([], overlap=lambda pause: 1 / 0)


def test_other_processes_find_cached_kernels():
    """Closure variables are part of a kernel's cache key."""
    source = """
import torch
from auraflux.ops import latent_output, linear
from auraflux.ops.simd.compile.ahead import collect_kernels, compile_all
from auraflux.quant.qtensor import quantize
with collect_kernels() as kernels:
    linear(torch.ones(1, 64), quantize(torch.ones(64, 64), 4, 32))
    linear(torch.ones(1, 64), torch.ones(64, 64, dtype=torch.bfloat16))
    latent_output(torch.ones(1, 2, 32), torch.ones(64, 32), 16)
print(len(kernels), sum(each.is_cached() for each in kernels))
compile_all(kernels)
"""
    found = [subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True) for _ in range(2)]
    kernels, cached = found[1].stdout.split()
    assert cached == kernels
    assert int(kernels) >= 3
