"""A model with pooled experts on a GPU that is not there: kernels are compiled ahead as its steps launch them."""

from typing import Any

import pytest

from tests.ops.gpu.test_capture import output_of

pytest.importorskip("triton")
# in a subprocess: this process has imported the kernels for the interpreter
PROGRAM = """
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from auraflux.bench.gpu.steps import BF16, CPU, RowWeights
from auraflux.bench.model import Ours
from auraflux.bench.shapes import shape_of
from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from auraflux.loading import warmup
from auraflux.loading.language_model import LanguageModel
from auraflux.models import family
from auraflux.ops.gpu import ahead
from auraflux.ops.moe._pool_cases import AnsweredDisk
from auraflux.ops.moe.pool import CpuMailbox, DiskMailbox
from auraflux.scheduler.scheduler import Scheduler
from auraflux.weights.experts.pool import gpu_pool
from auraflux.weights.experts.pool.host_memory import HostMemory
from auraflux.weights.experts.pool.layer_stream import LayerStream
from wheels.fake_cuda import GPU, fake_cuda

LAYERS, SLOTS, SEQUENCES, EXPERT = 3, 150, 2, 2_654_208


class Unfilled(RowWeights):
    def load_blobs(self, *args):
        pass

    def host_expert(self, name, found):
        return found


def numbers(*sizes, dtype=torch.int32):
    return torch.zeros(sizes, dtype=dtype)


def model_of(kind):
    config = shape_of("qwen3-30b-a3b", LAYERS)
    module = family(config)
    made, weights = module.Config.from_hf(config), Unfilled(4, 64, BF16, CPU)
    sizes = LAYERS, 128, 8, SLOTS * EXPERT, (LAYERS + 1) * 128 * EXPERT
    pool = weights.expert_pool = gpu_pool.GpuExpertPool(gpu_pool.PoolPlan(*sizes, cpu=False), GPU)
    model, shapes = module.Model(made, weights), module.make_caches(made)
    pool.finish()
    if kind == "cpu":
        pairs, x = (numbers(1), numbers(1), numbers(2), numbers(32), numbers(32)), torch.zeros(4, made.hidden, dtype=BF16)
        box = CpuMailbox(*pairs, x, torch.zeros(32, made.hidden), numbers(35), torch.zeros(33))
        pool._pool = replace(pool.pool, mailbox=box)
    if kind == "disk":
        asked = numbers(1), numbers(4), numbers(128), numbers(128, dtype=torch.int64), numbers(1)
        on_gpu = (numbers(count, dtype=torch.int64) for count in (128, 1, 1))
        box = DiskMailbox(*asked, numbers(200, EXPERT, dtype=torch.uint8), *on_gpu)
        pool._pool = replace(pool.pool, disk=AnsweredDisk(box))
    sizes = {"context": 4096, "sequences": SEQUENCES + 1, "chunk": 2048}
    engine = Engine(model, shapes, CacheSettings("k8v4"), **sizes, dtype=BF16, device=GPU)
    engine.use_pool(pool)
    return LanguageModel(Scheduler(engine, None, frozenset(), max_sequences=SEQUENCES), Path("pooled"), [], pool)


# fewer prompts
warmup.ROUTE_STEP, warmup.TILE_STEP, warmup.SHORT = 448, 1536, (48,)
silent = [
    mock.patch.object(HostMemory, "pin", lambda self, part: None),
    mock.patch.object(torch.cuda, "stream", lambda stream: nullcontext()),
    mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
]
for each in silent:
    each.start()
found = {}
for kind in ("host", "cpu", "disk"):
    with fake_cuda((9, 0)) as dry:
        model = model_of(kind)
        compiler = SimpleNamespace(begun=1, compiled=[], wait=lambda report: None, close=lambda: None)
        compilers = mock.patch.multiple(
            ahead, compiler=lambda: nullcontext(compiler), compile_launches_ahead=lambda compiler: nullcontext(dry)
        )
        with compilers:
            warmup.compile_ahead(model, warmup.Warmup(model).batches, [], lambda *report: None)
    streamed = model.experts._stream is not None
    with fake_cuda((9, 0)) as real, mock.patch.object(gpu_pool, "is_dry_run", lambda: False):
        warmup.launch_usual_steps(model)
    found[kind] = {
        "streamed": [streamed, isinstance(model.experts._stream, LayerStream)],
        "dry": sorted({each.name for each in dry}),
        "real": sorted({each.name for each in real}),
        "kernels": sorted({each.kernel for each in real}),
    }
with fake_cuda((9, 0)) as dry, mock.patch.multiple(
    ahead, compiler=lambda: nullcontext(compiler), compile_launches_ahead=lambda compiler: nullcontext(dry)
):
    # of the last kind
    bench = Ours(model.scheduler, 1, model.experts)
    bench.compile([8, 700])
with fake_cuda((9, 0)) as real, mock.patch.object(gpu_pool, "is_dry_run", lambda: False), model.engine.graphs.disabled():
    for length in (8, 700):
        bench.run(list(range(length)), 4)
found["bench"] = {"dry": sorted({each.name for each in dry}), "real": sorted({each.name for each in real})}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return output_of(PROGRAM)


@pytest.mark.parametrize("kind", ["host", "cpu", "disk"])
def test_compiled_ahead_is_what_steps_launch(found: dict[str, Any], kind: str):
    """With experts in host memory, some of them computed by CPU threads, and on disk."""
    one = found[kind]
    assert one["dry"] == one["real"]
    assert one["streamed"] == [False, True], "a dry run copies no experts"
    fetch = "fetch_disk:fetch_disk_kernel" if kind == "disk" else "fetch:fetch_kernel"
    assert f"auraflux.ops.moe.cuda.{fetch}" in one["kernels"]


def test_bench_compiles_what_it_runs(found: dict[str, Any]):
    assert found["bench"]["dry"] == found["bench"]["real"]
