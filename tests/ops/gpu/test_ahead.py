"""Kernels compiled before they are launched, without a GPU: Triton needs one only for the launch."""

from pathlib import Path

import pytest
import torch

from tests.ops.gpu.test_capture import output_of

pytest.importorskip("triton")
# in a subprocess: this process has imported the kernels for the interpreter
PROGRAM = """
import json, os, torch
from triton import knobs
from triton.runtime import driver
from auraflux.ops import rms_norm
from auraflux.ops.fake_gpu import HOPPER, use_fake_gpu
from auraflux.ops.gpu.ahead import compile_launches_ahead, compiler
from auraflux.ops.gpu.capture import CompileOnly
from auraflux.ops.gpu.launch import redirect_launches

class Stub(CompileOnly):
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

driver.set_active(Stub())


def start():
    progress, norm = [], rms_norm.kernel("cuda")
    with compiler() as made, use_fake_gpu(HOPPER):
        with compile_launches_ahead(made) as launched:
            for tokens in (4, 4, 5):
                found = norm(torch.ones(tokens, 128), torch.ones(128), 1e-6)
        with compile_launches_ahead(made):
            norm(torch.ones(4, 128), torch.ones(128), 1e-6)
        try:
            with compile_launches_ahead(made):
                raise KeyError("ended")
        except KeyError as err:
            said = err.args[0]
        made.wait(lambda *done: progress.append(done))
    return made.compiled, progress, found.abs().max().item(), said, len(launched)


def launched_by_triton():
    # the kernels that Triton compiles when it launches what was compiled ahead
    fresh = []
    knobs.compilation.listener = lambda **event: None if event["cache_hit"] else fresh.append(event["metadata"]["name"])
    receive = lambda kernel, grid, *args, **named: kernel.run(*args, grid=grid, warmup=True, **named)
    with use_fake_gpu(HOPPER), redirect_launches(receive):
        rms_norm.kernel("cuda")(torch.ones(4, 128), torch.ones(128), 1e-6)
    return fresh


# two processes that have nothing in common but the cache on disk
found = []
for _ in range(2):
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, json.dumps([*start(), launched_by_triton()]).encode())
        os._exit(0)
    os.wait()
    found.append(json.loads(os.read(read, 1 << 16)))
print(json.dumps(found))
"""


ORDER = """
import json, os
import auraflux.ops.moe.cuda.gemm.persistent as kernels

names = ["up_stream", "down_stream"]
keys = {name: getattr(kernels, name).cache_key for name in names[:: int(os.environ["ORDER"])]}
print(json.dumps(keys, sort_keys=True))
"""


def test_keys_in_the_cache_do_not_depend_on_earlier_kernels():
    """A process that compiles ahead would store kernels where the process that launches them does not look."""
    assert output_of(ORDER, ORDER="1") == output_of(ORDER, ORDER="-1")


def test_launches_are_compiled_once_and_cached_for_the_next_start(tmp_path: Path):
    (fresh, reported, largest, said, launches, by_triton), second = output_of(PROGRAM, TRITON_CACHE_DIR=str(tmp_path))
    assert said == "ended"
    assert launches == 3
    assert by_triton == []
    assert fresh == ["_rms"]
    assert reported == [[0, 1]]
    assert largest == 0, "a kernel that was not launched has left zeros"
    assert len(list(tmp_path.rglob("*.cubin"))) == 1
    assert second[0] == []


def test_uninitialised_tensors_are_zeros_inside_the_block_only():
    pytest.importorskip("auraflux.ops.gpu.ahead")
    from auraflux.ops.gpu.ahead import EMPTY, zeroed_empty_tensors

    before = [getattr(place, name) for place, name in EMPTY]
    one = torch.ones(3)
    with zeroed_empty_tensors():
        made = [torch.empty(3), torch.empty_like(one), torch.empty_strided((3,), (1,)), one.new_empty(3)]
        made.append(one.new_empty_strided((3,), (1,)))
    assert all(each.eq(0).all() for each in made)
    assert [getattr(place, name) for place, name in EMPTY] == before
