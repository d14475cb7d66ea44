"""Kernels that are compiled before they are launched, tried without a GPU: Triton needs one for the launch alone."""

from pathlib import Path

import pytest

from tests.ops.test_capture import told

pytest.importorskip("triton")
# in a process of its own: here the kernels are imported for the interpreter
PROGRAM = """
import json, torch
from triton.runtime import driver
from auraflux.ops import rms_norm
from auraflux.ops.assumed import HOPPER, assume_gpu
from auraflux.ops.hopper.ahead import compiled_ahead, counted_builds
from auraflux.ops.hopper.capture import CompileOnly

class Stub(CompileOnly):
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

driver.set_active(Stub())
told, norm = [], rms_norm.kernel("cuda")
with counted_builds() as fresh, assume_gpu(HOPPER):
    with compiled_ahead(lambda *done: told.append(done)):
        for tokens in (4, 4, 5):
            found = norm(torch.ones(tokens, 128), torch.ones(128), 1e-6)
    with compiled_ahead(lambda *done: told.append(done)):
        norm(torch.ones(4, 128), torch.ones(128), 1e-6)
    try:
        with compiled_ahead(lambda *done: told.append(done)):
            raise KeyError("ended")
    except KeyError as err:
        said = err.args[0]
print(json.dumps([fresh, told, found.abs().max().item(), said]))
"""


def test_what_would_be_launched_is_compiled_once_and_found_by_the_next_start(tmp_path: Path):
    fresh, reported, largest, said = told(PROGRAM, TRITON_CACHE_DIR=str(tmp_path))
    assert said == "ended"
    assert fresh == ["_rms"]
    assert reported == [[0, 1]]
    assert largest == 0, "a kernel that was not launched has left zeros"
    assert len(list(tmp_path.rglob("*.cubin"))) == 1
    assert told(PROGRAM, TRITON_CACHE_DIR=str(tmp_path))[0] == []
