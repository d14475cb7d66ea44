"""Features of a GPU by its compute capability, sizes that follow from them, and AURAFLUX_AS_GPU."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from auraflux.errors import SettingsError
from auraflux.ops.fake_gpu import SHARED_KB, use_fake_gpu

pytest.importorskip("triton")
from auraflux.ops.gpu import launch
from auraflux.ops.gpu.as_gpu import capability_named
from auraflux.ops.gpu.device import launches_early, multiprocessor_nbytes, not_clusters, not_gluon, not_tma, not_wgmma
from auraflux.ops.hopper.ptx import with_older_instructions
from auraflux.ops.linear.cuda.gemm import int4_skinny
from auraflux.ops.turboquant.codebook import BITS
from auraflux.ops.turboquant.cuda.decode import plan
from auraflux.ops.turboquant.cuda.decode.ring import stage_nbytes

CPU = torch.device("cpu")
SMALL = [gpu for gpu, kb in SHARED_KB.items() if kb < 227]


@pytest.mark.parametrize("gpu", SHARED_KB)
def test_features_follow_from_the_compute_capability(gpu: tuple[int, int]):
    with use_fake_gpu(gpu):
        assert not_gluon(CPU) is None
        assert (not_wgmma(CPU) is None) == (gpu == (9, 0))
        assert (not_tma(CPU) is None) == (not_clusters(CPU) is None) == launches_early(CPU) == (gpu >= (9, 0))
        assert multiprocessor_nbytes(CPU) == (SHARED_KB[gpu] + 1) << 10
    assert not_gluon(CPU) is not None


@pytest.mark.parametrize("gpu", SMALL)
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("exact", [False, True])
def test_decode_plans_fit_into_little_shared_memory(gpu: tuple[int, int], width: int, exact: bool):
    nbytes, refused = (SHARED_KB[gpu] + 1) << 10, set()
    for bits in [(key, value) for key in BITS for value in BITS]:
        found = plan.small_program(bits, width, nbytes, exact)
        if found is None:
            refused.add(bits)
            continue
        program, stages, compact = found
        assert not (compact and (exact or not set(bits) <= {4, 8}))
        ring = program.warps * stages * stage_nbytes(width, *bits, 1)
        assert plan.ring_begin(width, compact) + -(-ring // 4096) * 4096 + 1024 <= nbytes
        assert program.warps * 32 * program.registers <= 1 << 16
    # models are served with these
    assert exact or not refused & {(4, 4), (8, 4), (8, 8)}


@pytest.mark.parametrize("tokens", [2, 8, 16])
@pytest.mark.parametrize(("rows", "width"), [(8192, 8192), (4096, 14336), (1024, 4096), (64, 256)])
def test_skinny_tiles_fit_into_little_shared_memory(tokens: int, rows: int, width: int):
    weight: Any = SimpleNamespace(shape=(rows, width))
    with use_fake_gpu((8, 9)):
        tile = int4_skinny.choose_tile(torch.empty(tokens, 0), weight)
    assert tile is not None
    assert tile.nbytes(1 if tokens <= 8 else 2, width) <= 99 << 10
    assert rows % (16 * tile.blocks) == 0


def test_older_gpus_get_older_instructions():
    ptx = "{.reg .b32 m,k; mul.rn.bf16x2 $0,$1,m; max.u16x2 m,m,k;}"
    assert with_older_instructions.fn(ptx, True) == ptx
    older = with_older_instructions.fn(ptx, False)
    assert "fma.rn.bf16x2 $0,$1,m,minus;" in older
    assert "vmax2.u32.u32.u32 m,m,k,zero;" in older
    assert "mul.rn" not in older


@pytest.mark.parametrize("early", [True, False])
def test_launches_are_early_only_where_the_gpu_can(early: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "_launches_early", lambda: early)
    assert launch.supported_options({"launch_pdl": True, "num_warps": 4}) == (
        {"launch_pdl": True, "num_warps": 4} if early else {"num_warps": 4}
    )


def test_a_gpu_passes_for_another():
    text = "import torch, auraflux.ops.gpu.device; print(torch.cuda.get_device_capability())"
    environment = {**os.environ, "AURAFLUX_AS_GPU": "8.6"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(8, 6)"
    with pytest.raises(SettingsError, match=r"AURAFLUX_AS_GPU is '7.5'; it must be one of 8.0, 8.6"):
        capability_named("7.5")
