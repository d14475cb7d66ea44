"""Kernels compiled before they are launched, without a GPU: Triton needs one only for the launch."""

from pathlib import Path

import pytest

from tests.ops.gpu.test_capture import output_of

pytest.importorskip("triton")
# in a subprocess: this process has imported the kernels for the interpreter
PROGRAM = """
import json, os, torch
from triton.runtime import driver
from auraflux.ops import rms_norm
from auraflux.ops.fake_gpu import HOPPER, use_fake_gpu
from auraflux.ops.gpu.ahead import compile_launches_ahead, record_compilations
from auraflux.ops.gpu.capture import CompileOnly

class Stub(CompileOnly):
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

driver.set_active(Stub())


def start():
    progress, norm = [], rms_norm.kernel("cuda")
    with record_compilations() as fresh, use_fake_gpu(HOPPER):
        with compile_launches_ahead(lambda *done: progress.append(done)):
            for tokens in (4, 4, 5):
                found = norm(torch.ones(tokens, 128), torch.ones(128), 1e-6)
        with compile_launches_ahead(lambda *done: progress.append(done)):
            norm(torch.ones(4, 128), torch.ones(128), 1e-6)
        try:
            with compile_launches_ahead(lambda *done: progress.append(done)):
                raise KeyError("ended")
        except KeyError as err:
            said = err.args[0]
    return fresh, progress, found.abs().max().item(), said


# two processes that have nothing in common but the cache on disk
found = []
for _ in range(2):
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, json.dumps(start()).encode())
        os._exit(0)
    os.wait()
    found.append(json.loads(os.read(read, 1 << 16)))
print(json.dumps(found))
"""


def test_launches_are_compiled_once_and_cached_for_the_next_start(tmp_path: Path):
    (fresh, reported, largest, said), second = output_of(PROGRAM, TRITON_CACHE_DIR=str(tmp_path))
    assert said == "ended"
    assert fresh == ["_rms"]
    assert reported == [[0, 1]]
    assert largest == 0, "a kernel that was not launched has left zeros"
    assert len(list(tmp_path.rglob("*.cubin"))) == 1
    assert second[0] == []
