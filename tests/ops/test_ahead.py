"""Kernels that are compiled before they are needed."""

import os
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
from auraflux.ops.simd import ahead
from auraflux.ops.simd.ahead import compile_all, noted

X, WEIGHT = torch.ones(1, 64), torch.full((64,), 2.0)


def test_kernels_are_noted_once_and_do_not_run():
    with noted() as kernels:
        found = [rms_norm(X, WEIGHT, 1e-6) for _ in range(2)]
    assert len(kernels) == 1
    assert not any(each.any() for each in found)
    assert rms_norm(X, WEIGHT, 1e-6).allclose(WEIGHT)


def test_other_threads_run_meanwhile():
    found: list[torch.Tensor] = []
    with noted() as kernels:
        other = threading.Thread(target=lambda: found.append(rms_norm(X, WEIGHT, 1e-6)))
        other.start()
        other.join()
    assert not kernels
    assert found[0].allclose(WEIGHT)


def test_functions_that_give_a_number_are_noted_too():
    index = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    table, lengths, starts = (each.data_ptr() for each in index)
    arguments = table, 1, lengths, starts, 1, 1, 16, 1, 0
    with noted() as kernels:
        assert survey.ask(*arguments) == 0
    assert list(kernels) == [survey]
    assert survey.ask(*arguments) == 1
    assert survey.is_kept()


def test_new_memory_is_as_before_afterwards():
    before = torch.empty, torch.empty_like, torch.Tensor.new_empty
    with pytest.raises(ZeroDivisionError), noted():
        1 / 0  # noqa: B018
    assert (torch.empty, torch.empty_like, torch.Tensor.new_empty) == before


def test_what_is_there_is_not_compiled_again():
    swiglu(X, X)
    with noted() as kernels:
        swiglu(X, X)
    told: list[str] = []
    compile_all(kernels, lambda name, done, total: told.append(name))
    assert not told


LATER = """
import os, torch
from auraflux.ops import rms_norm, sigmoid_gate, swiglu
from auraflux.ops.simd import ahead

x, weight = torch.ones(1, 64), torch.full((64,), 2.0)
os.sched_getaffinity = lambda pid: {0, 1}
with ahead.noted() as needed:
    rms_norm(x, weight, 1e-6)
with ahead.noted() as later:
    swiglu(x, x), sigmoid_gate(x, x)
for _ in range(3):
    # as models that are loaded one after the other on a busy machine
    ahead.compile_all(needed if NEEDED else [], lambda name, done, total: print(done, total), later)
assert len(ahead._going_on) <= 2
assert all(each.is_kept() for each in needed) is NEEDED
ahead.wait()
assert all(each.is_kept() for each in later)
assert rms_norm(x, weight, 1e-6).allclose(weight)
"""


@pytest.mark.parametrize("needed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_is_needed_later_is_compiled_in_the_background(tmp_path: Path, needed: bool):
    environment = {**os.environ, "AURAFLUX_CACHE": str(tmp_path)}
    code = LATER.replace("NEEDED", str(needed))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("0 1\n1 1\n" if needed else "")


AHEAD = """
import os, torch
from auraflux.ops import rms_norm, sigmoid_gate, swiglu
from auraflux.ops.simd import ahead, jit

x, weight = torch.ones(1, 64), torch.full((64,), 2.0)
os.sched_getaffinity = lambda pid: {0, 1}
with ahead.noted() as kernels:
    rms_norm(x, weight, 1e-6), swiglu(x, x), sigmoid_gate(x, x)
if KILLED:
    jit.Kernel.compile, compile = lambda self: os._exit(9) if os.getpid() != here else compile(self), jit.Kernel.compile
here = os.getpid()


# a process of an earlier call that gets no processor
class Starved:
    def is_alive(self):
        return True

    def join(self):
        raise AssertionError("it was waited for")


ahead._going_on.append(Starved())
ahead.compile_all(kernels, lambda name, done, total: print(done, total))
assert len(ahead._going_on) == 1
assert all(each.is_kept() for each in kernels)
assert rms_norm(x, weight, 1e-6).allclose(weight)
"""


@pytest.mark.parametrize("killed", [False, True], ids=["shared", "whose processes are killed"])
def test_processes_share_the_work_or_it_is_done_without_them(tmp_path: Path, killed: bool):
    code = AHEAD.replace("KILLED", str(killed))
    environment = {**os.environ, "AURAFLUX_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if not killed:
        assert done.stdout.split("\n")[-2] == "3 3"


EARLY = """
import os, torch
from auraflux.ops import rms_norm, sigmoid_gate, swiglu
from auraflux.ops.simd import ahead, threads

x, weight = torch.ones(1, 64), torch.full((64,), 2.0)
os.sched_getaffinity = lambda pid: {0, 1}
kernels = []
for call in (lambda: rms_norm(x, weight, 1e-6), lambda: swiglu(x, x), lambda: sigmoid_gate(x, x)):
    with ahead.noted() as noted:
        call()
    kernels += noted
ahead.begin(kernels[:1])
(early,) = ahead._early
if KILLED:
    early.process.kill()
wanted = kernels if WANTED else kernels[1:]

def meanwhile(pause):
    pause()
    assert wanted[-1].is_kept()
    print("meanwhile")

before = threads.threads(), torch.get_num_threads()
ahead.compile_all(wanted, first=wanted[-1:], meanwhile=meanwhile)
assert all(each.is_kept() for each in wanted)
assert (threads.threads(), torch.get_num_threads()) == before
early.process.join(60)
assert kernels[0].is_kept() is WANTED
assert not ahead._early
"""


@pytest.mark.parametrize(
    ("wanted", "killed"),
    [
        pytest.param(True, False, id="wanted"),
        pytest.param(True, True, id="wanted, and killed"),
        pytest.param(False, False, id="not wanted"),
        pytest.param(False, True, id="not wanted, and killed", marks=pytest.mark.slow),
    ],
)
def test_what_was_begun_early_is_not_begun_again(tmp_path: Path, wanted: bool, killed: bool):
    code = EARLY.replace("WANTED", str(wanted)).replace("KILLED", str(killed))
    environment = {**os.environ, "AURAFLUX_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "meanwhile\n"


def test_who_compiles_for_a_model_that_cannot_be_loaded_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ended: list[str] = []
    process = SimpleNamespace(terminate=lambda: ended.append("early"))
    monkeypatch.setattr(ahead, "begin", lambda kernels: ahead._early.append(ahead._Early(kernels, process)))
    with pytest.raises(FormatError, match=r"no config\.json"):
        auraflux.load(tmp_path, device="cpu")
    assert ended == ["early"]
    assert not ahead._early


def test_what_fails_meanwhile_is_heard_of():
    with pytest.raises(ZeroDivisionError):
        compile_all([], meanwhile=lambda pause: 1 / 0)


def test_kernels_are_found_again_by_other_processes():
    """What a body has of its surroundings is part of the name it is kept under."""
    source = """
import torch
from auraflux.ops import latent_output, linear
from auraflux.ops.simd.ahead import compile_all, noted
from auraflux.run import prepare
from auraflux.quant.qtensor import quantize
with noted() as kernels:
    linear(torch.ones(1, 64), quantize(torch.ones(64, 64), 4, 32))
    linear(torch.ones(1, 64), torch.ones(64, 64, dtype=torch.bfloat16))
    latent_output(torch.ones(1, 2, 32), torch.ones(64, 32), 16)
print(len(kernels), sum(each.is_kept() for each in kernels))
compile_all(kernels)
"""
    found = [subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True) for _ in range(2)]
    kernels, kept = found[1].stdout.split()
    assert kept == kernels
    assert int(kernels) >= 3
