"""Experts of every checkpoint layout, loaded into a `GpuExpertPool`, equal the resident ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from auraflux.errors import ExpertError, FormatError
from auraflux.loading.gpu_plan import make_pool
from auraflux.loading.gpu_sizes import gpu_sizes
from auraflux.models import family
from auraflux.ops.moe.experts import BIASES, KINDS, Experts
from auraflux.quant import QTensor
from auraflux.weights.experts.pool.gpu_pool import GpuExpertPool
from auraflux.weights.experts.pool.pooled_experts import PooledExperts
from auraflux.weights.experts.settings import ExpertSettings
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.loader import Weights
from tests.weights.experts.packed_folders import converted, hf_folder, packed
from tests.weights.formats.gguf_files import write_gguf
from tests.weights.formats.gguf_models import METADATA, gguf_tensors, tiny

CPU = torch.device("cpu")


def model_of(path: Path, pooled: bool, verify: bool = True, **options: Any) -> tuple[Any, GpuExpertPool | None]:
    """Load a model in the layout of GPU kernels, on the CPU."""
    checkpoint = open_checkpoint(path)
    module = family(checkpoint.config)
    config = module.Config.from_hf(checkpoint.config)
    pool = None
    if pooled:
        sizes = gpu_sizes(checkpoint, module.rename, config.hidden, options.get("bits")).experts
        assert sizes is not None
        pool = make_pool(sizes, 2 * sizes.total, CPU, ExpertSettings(verify=verify))
    weights = Weights(checkpoint, module.rename, dtype=torch.bfloat16, expert_pool=pool, **options)
    weights.layout = "cuda"
    model = module.Model(config, weights)
    weights.check_loaded()
    if pool is not None:
        pool.finish()
    return model, pool


def experts_in(model: Any) -> list[Any]:
    """Return the experts of all mixture layers."""
    mlps = [layer.mlp for layer in model.layers]
    return [mlp.experts for mlp in mlps if getattr(mlp, "experts", None) is not None]


def assert_equal(found: Experts, expected: Experts) -> None:
    for name in (*KINDS, *BIASES):
        mine, theirs = getattr(found, name), getattr(expected, name)
        assert (mine is None) == (theirs is None)
        if isinstance(mine, QTensor):
            assert isinstance(theirs, QTensor)
            assert mine.kind == theirs.kind
            for expert in range(expected.count):
                assert torch.equal(mine[expert].dequantize(), theirs[expert].dequantize())
        elif mine is not None:
            assert isinstance(theirs, Tensor)
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
    assert found.activation == expected.activation


def check(path: Path, resident: Path | None = None, **options: Any) -> None:
    """Compare experts in a pool with resident ones."""
    model, pool = model_of(path, pooled=True, **options)
    assert pool is not None
    assert pool.resident
    expected, _ = model_of(resident or path, pooled=False, **options)
    layers = experts_in(model)
    assert layers
    assert all(isinstance(each, PooledExperts) for each in layers)
    for mine, theirs in zip(layers, experts_in(expected), strict=True):
        assert_equal(pool.layers[mine.layer], theirs.experts)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral"])
def test_hf_folders(kind: str, bits: int | None, tmp_path: Path):
    check(hf_folder(tmp_path / "hf", kind), bits=bits, group=32)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_mlx_folders(kind: str, tmp_path: Path):
    check(converted(hf_folder(tmp_path / "hf", kind), tmp_path / "mlx", bits=4, group=32))


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_packed_folders(kind: str, tmp_path: Path):
    source = converted(hf_folder(tmp_path / "hf", kind), tmp_path / "mlx", bits=4, group=32)
    check(packed(source, tmp_path / "packed", lanes=1), resident=source)


@pytest.mark.parametrize("blocks", ["Q8_0", "Q4_1", "MXFP4"])
def test_gguf_files(blocks: str, tmp_path: Path):
    kind = "glm4moe"
    check(write_gguf(tmp_path / "m.gguf", gguf_tensors(tiny(kind), kind), blocks, kind, METADATA[kind]))


def test_damaged_packed_file_is_refused(tmp_path: Path):
    source = converted(hf_folder(tmp_path / "hf"), tmp_path / "mlx", bits=4, group=32)
    folder = packed(source, tmp_path / "packed", lanes=1)
    file = sorted((folder / "experts").glob("*.bin"))[0]
    octets = bytearray(file.read_bytes())
    octets[100] ^= 1
    file.write_bytes(octets)
    with pytest.raises(ExpertError, match="does not match its checksum"):
        model_of(folder, pooled=True)
    model_of(folder, pooled=True, verify=False)


def test_missing_experts_are_named(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    folder = hf_folder(tmp_path / "hf", "deepseek_v3")
    path = next(folder.glob("*.safetensors"))
    tensors = load_file(path)
    name = next(name for name in tensors if ".experts." in name)
    del tensors[name]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(FormatError, match="1 missing"):
        model_of(folder, pooled=True)


@pytest.mark.parametrize("bits", [None, 4])
def test_sizes_match_loaded_weights(bits: int | None, tmp_path: Path):
    checkpoint = open_checkpoint(hf_folder(tmp_path / "hf"))
    module = family(checkpoint.config)
    sizes = gpu_sizes(checkpoint, module.rename, 128, bits)
    _, pool = model_of(tmp_path / "hf", pooled=True, bits=bits)
    assert pool is not None
    assert sizes.experts is not None
    assert (sizes.experts.layers, sizes.experts.count, sizes.experts.k, sizes.experts.inner) == (2, 5, 2, 64)
    assert sizes.experts.nbytes == pool.pool.memory.shape[1]
    assert sizes.experts.total == pool.pool.memory.nbytes
