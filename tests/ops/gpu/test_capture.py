"""Kernel variants found without a GPU: those that Triton would compile, from tensors without storage."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from auraflux.ops.fake_gpu import AMPERE, HOPPER, fake_capability, use_fake_gpu
from auraflux.ops.fake_tensor import LARGE, FakeTensors
from auraflux.quant import quantize

pytest.importorskip("triton")
ROOT = Path(__file__).parents[3]
# in a subprocess: this process has imported the kernels for the interpreter
OTHER_GPU = """
import json
from auraflux.ops._cases import all_cases
from auraflux.ops.gpu.capture import variants_of

case = next(case for case in all_cases() if case.id == "route-qwen-one-token")
found = {gpu: variants_of(case, [gpu])[0] for gpu in ((8, 9), (9, 0))}
print(json.dumps([[each.name, each.target.arch] for variants in found.values() for each in variants]))
"""
PROGRAM = """
import json, torch
import triton, triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from auraflux.ops._cases import Case
from auraflux.ops import rms_norm
from auraflux.ops.gpu.capture import capture_variants, variants_of
from auraflux.ops.gpu.launch import launch
from tests.ops.gpu.test_capture import typed

x, y = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64)
layout = gl.NVMMASharedLayout.get_default_for([8, 8], gl.bfloat16)
tiles = TensorDescriptor.from_tensor(x.view(8, 8), [8, 8], layout)
with capture_variants() as builds:
    for _ in range(2):
        launch(typed, (1,))(x, y[1:], None, 1, 48, 47, 0.5, tiles, BLOCK=16, num_warps=8)
found = [[each.name, each.family, list(each.signature.values()), [list(key) for key in each.constants]] for each in builds]
norm = Case(rms_norm, "one", lambda: {"x": torch.zeros(4, 128), "weight": torch.zeros(128), "eps": 1e-6})
print(json.dumps([found, [each.name for each in variants_of(norm)[0]]]))
"""
# batched prefills have any number of tokens: 7 prompts of 1023, and 8
COUNTED = """
import json
from functools import partial
from auraflux.ops._cases import Case
from auraflux.ops._gpu_inputs import experts, moe, routed
from auraflux.ops.gpu.capture import variants_of
from auraflux.ops.moe.reference import expert_mlp, mixture

made = {expert_mlp: lambda t: routed(t, experts()), mixture: lambda t: moe(t, experts())}
cases = [[Case(op, "", partial(make, tokens)) for tokens in (7161, 8184)] for op, make in made.items()]
print(json.dumps([[[each.name for each in variants_of(case)[0]] for case in pair] for pair in cases]))
"""
# the same for complete models, with a fixed cache
READ = """
import json, torch
from auraflux.bench.gpu.steps import BF16, CPU, LAYERS, RowWeights
from auraflux.bench.shapes import shape_of
from auraflux.cache import Cache, CacheSettings
from auraflux.models import family
from auraflux.ops import exact
from auraflux.ops._dispatch import use_backend
from auraflux.ops.fake_gpu import use_fake_gpu
from auraflux.ops.gpu.capture import capture_variants

found = {}
for name in ("qwen3.6-35b-a3b", "deepseek-v3-4layer"):
    config = shape_of(name, LAYERS[name])
    module = family(config)
    settings = module.Config.from_hf(config)
    with capture_variants() as builds, use_fake_gpu(), use_backend("cuda"), exact(False):
        model, sizes = module.Model(settings, RowWeights(4, 64, BF16, CPU)), {"context": 4096, "sequences": 8, "chunk": 8192}
        cache = Cache(module.make_caches(settings), CacheSettings("k4v4"), **sizes, dtype=BF16, device=CPU)
        for counts in ([1024] * 8, [1023] * 8, [1023] * 7 + [1016], [1500, 1500, 1500, 1500, 1100, 900, 100, 55]):
            before, sequences = len(builds), [cache.open() for _ in counts]
            batch = cache.batch(sequences)
            batch.extend(counts)
            model.forward(torch.zeros(sum(counts), dtype=torch.int64), batch, cache)
            found.setdefault(name, []).append([each.name for each in builds[before:]])
            for sequence in sequences:
                sequence.close()
print(json.dumps(found))
"""

if not os.environ.get("TRITON_INTERPRET"):
    import triton

    @triton.jit
    def typed(a, b, c, one, even, odd, factor, tiles, BLOCK: triton.language.constexpr, WIDE: triton.language.constexpr = True):
        pass


TOGETHER = """
import contextlib, io, json, sys
found = []
for program in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, {})
    found.append(json.loads(printed.getvalue()))
print(json.dumps(found))
"""


def output_of(program: str, given: str = "", **more: str) -> Any:
    """Return the output of a program that does not interpret kernels, with additions to its environment."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), **more}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def outputs() -> dict[str, Any]:
    """The outputs of all programs, which run in one process: its imports take longer than they do."""
    programs = [OTHER_GPU, PROGRAM, COUNTED, READ]
    return dict(zip(programs, output_of(TOGETHER, json.dumps(programs)), strict=True))


def test_prompt_lengths_share_kernel_variants(outputs: dict[str, Any]):
    """A variant specialised on a number would be compiled while the first client with that many tokens waits."""
    for odd, even in outputs[COUNTED]:
        assert odd
        assert odd == even


def test_batched_prompt_lengths_share_kernel_variants_of_a_model(outputs: dict[str, Any]):
    for first, *others in outputs[READ].values():
        assert first
        assert others == [[], [], []]


def test_a_launch_means_the_variant_that_triton_compiles(outputs: dict[str, Any]):
    ((name, _, types, constants),), norm = outputs[PROGRAM]
    assert types[:7] == ["*bf16", "*fp32", "constexpr", "constexpr", "i32", "i32", "fp32"]
    assert types[7].startswith("tensordesc<bf16[8, 8]")
    assert types[8:] == ["constexpr", "constexpr"]
    assert constants == [[2], [3], [8], [9]]
    assert name.startswith("typed *bf16 *fp32:1 i32:16 i32 fp32 tensordesc<")
    assert name.endswith("c=None one=1 BLOCK=16 WIDE=True num_warps=8")
    assert [each.split()[0] for each in norm] == ["_rms"]


def test_a_gpu_before_hopper_gets_no_early_launch(outputs: dict[str, Any]):
    """`griddepcontrol` needs Hopper; ptxas refuses it for any GPU before."""
    older, hopper = outputs[OTHER_GPU]
    assert (older[1], hopper[1]) == (89, 90)
    assert "EARLY=False" in older[0]
    assert "EARLY=True" in hopper[0]


def test_large_tensors_are_not_filled_and_small_ones_are():
    with FakeTensors():
        small, large = torch.arange(8) * 2, torch.randn(1 << 15, 1 << 16)
        weight = quantize(torch.randn(1 << 14, 1 << 14).bfloat16(), 4, 64)
        ranked = large.topk(3)
        large += 1
    assert small.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert large.shape == (1 << 15, 1 << 16)
    assert (weight.packed.shape, weight.packed.dtype) == ((1 << 14, 1 << 11), torch.int32)
    assert (ranked.indices.shape, ranked.indices.dtype) == ((1 << 15, 3), torch.int64)


def test_reductions_to_a_number_are_zero():
    with FakeTensors():
        assert torch.ones(LARGE).sum().item() == 0
        assert torch.ones(LARGE - 1).sum().item() == LARGE - 1


def test_a_gpu_can_be_faked():
    assert fake_capability() is None
    with use_fake_gpu(AMPERE):
        assert fake_capability() == AMPERE
        with use_fake_gpu():
            assert fake_capability() == HOPPER
    assert fake_capability() is None
