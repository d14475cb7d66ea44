"""Tensor parallelism equals one process up to the order of summation."""

import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from auraflux.distributed.comm.devices import nccl_all_gather
from auraflux.distributed.comm.group import Group, open_rendezvous
from auraflux.distributed.parallel import LOCAL
from auraflux.engine.engine import nbytes
from auraflux.errors import SettingsError
from auraflux.loading.load import load
from auraflux.models import llama as llama_family
from auraflux.quant import quantize
from auraflux.weights.experts.settings import ExpertSettings
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.loader import Weights
from auraflux.weights.parallel.tensor_slices import Slices, cut
from tests.distributed.test_pipeline import OPTIONS
from tests.distributed.test_pipeline import saved as pipeline_models
from tests.distributed.threaded_ranks import decoded, threaded_ranks
from tests.models.oracles import error, save, tokens
from tests.models.test_deepseek_v3 import deepseek
from tests.models.test_gemma3_text import gemma
from tests.models.test_gemma4_text import mixture, small_gemma4
from tests.models.test_gpt_oss import gpt_oss
from tests.models.test_kimi_linear import kimi_linear
from tests.models.test_llama import llama
from tests.models.test_nemotron_h import nemotron_h
from tests.models.test_offloaded import packed
from tests.models.test_qwen3_5_moe import qwen3_5_moe
from tests.models.test_qwen3_moe import olmoe, qwen2_moe, qwen3_moe
from tests.models.test_qwen4_exp import qwen4

ROUNDING = 1e-6  # of another order of summation
BF16_ROUNDING = 1e-4  # of a few keys and values that another order rounds to the next bf16 number
FOUR: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4}
DELTA: dict[str, Any] = {"linear_num_key_heads": 3, "linear_num_value_heads": 6}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: llama(**FOUR, attention_bias=True),
    "qwen3_moe": lambda: qwen3_moe(**FOUR, mlp_only_layers=[0]),
    "gpt_oss": lambda: gpt_oss(**FOUR),
    "qwen3_5_moe": lambda: qwen3_5_moe(**FOUR, **DELTA),
    "deepseek_v3": deepseek,
    "gemma3_text": lambda: gemma(**FOUR),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "qwen2_moe": qwen2_moe,
    "kimi_linear": kimi_linear,
    "nemotron_h": nemotron_h,
    "nemotron_h-latent": lambda: nemotron_h(moe_latent_size=64),
    "gemma4": lambda: mixture(num_global_key_value_heads=2),
    "gemma4-little": lambda: small_gemma4(num_key_value_heads=2),
    "qwen4_exp": qwen4,
}


@cache
def saved(name: str) -> tuple[Path, list[int]]:
    torch.manual_seed(0)
    model = {**FAMILIES, **OTHERS}[name]()
    return save(model, Path(mkdtemp(prefix="auraflux-ranks-"))), tokens(model, 90)


def check(path: Path, ids: list[int], size: int, bound: float, **options: Any) -> None:
    """Compare ranks with one process: logits of chunked prefill, of one sequence and of four."""
    alone = load(path, **OPTIONS, **options)
    with threaded_ranks(path, f"tensor={size}", **OPTIONS, **options) as ranks:
        assert nbytes(ranks.engine.model) < nbytes(alone.engine.model)
        assert error(ranks.logits(ids[:60]), alone.logits(ids[:60])) < bound
        for prompts in ([ids[:11]], [ids[:17], ids[5:12], ids[30:60], ids[7:8]]):
            assert error(decoded(ranks, prompts, 4), decoded(alone, prompts, 4)) < bound
        first, again = (ranks.logits(ids[:30]) for _ in range(2))
        assert torch.equal(first, again)


@pytest.mark.parametrize("kv", ["none", "k4v4"])
def test_heads_of_two_ranks(kv: str):
    check(*saved("llama"), 2, bound_of(kv), kv=kv, exact=True)


def bound_of(kv: str) -> float:
    """Return the error bound: the most recent tokens of a quantized KV cache are rounded to bf16."""
    return ROUNDING if kv == "none" else BF16_ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["none", "k4v4"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str, size: int, kv: str):
    check(*saved(name), size, bound_of(kv), kv=kv, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_replicated_tensors(name: str):
    check(*saved(name), 2, ROUNDING, kv="none", exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss"])
def test_quantization_groups_are_not_split(name: str):
    check(*saved(name), 2, ROUNDING, kv="none", exact=True, quantize=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_packed_experts_are_split_by_expert(name: str):
    path, ids = packed(name)
    few = ExpertSettings(memory=1 << 20, io="direct")
    check(path, [*ids, *ids], 2, ROUNDING, kv="none", exact=True, expert_memory=few)


def test_a_rank_caches_the_keys_of_its_heads():
    path, _ = saved("llama")
    alone = load(path, kv="k4v4", **OPTIONS)
    with threaded_ranks(path, "tensor=2", kv="k4v4", **OPTIONS) as ranks:
        assert 2 * ranks.engine.cache.token_nbytes == alone.engine.cache.token_nbytes
        assert 2 * ranks.engine.cache.page_nbytes == alone.engine.cache.page_nbytes
        # one process and ranks save the same calibration
        mine, all_heads = ranks.engine.cache.key_calibration, alone.engine.cache.key_calibration
        assert torch.equal(mine.layers[0].scale, all_heads.layers[0].scale[:2])


def test_key_calibration_by_ranks_equals_that_of_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path, _ = saved("llama")
    found = []
    for name in ("alone", "ranks"):
        monkeypatch.setenv("AURAFLUX_CACHE", str(tmp_path / name))
        if name == "alone":
            load(path, kv="k4v4", exact=True, **OPTIONS)
        else:
            with threaded_ranks(path, "tensor=2", kv="k4v4", exact=True, **OPTIONS):
                pass
        (file,) = (tmp_path / name / "calibration").glob("*.calibration")
        found.append((file.name, load_file(file)))
    assert found[0][0] == found[1][0]
    for name, tensor in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], tensor, rtol=0.02, atol=1e-3)


def test_all_gather_in_one_call():
    # the NCCL path of GPUs, with gloo
    place, server = open_rendezvous(LOCAL, 0)
    made = [None, None]

    def join(rank: int) -> None:
        made[rank] = Group(place, 1, rank, 2, 15.0)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    found: list[Any] = [None, None]

    def give(rank: int) -> None:
        found[rank] = nccl_all_gather(made[rank]._gloo, torch.full((3, 4), float(rank)), 2)

    for each in threads:
        each.start()
    for each in threads:
        each.join()
    threads = [threading.Thread(target=give, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for group, parts in zip(made, found, strict=True):
        assert [float(part.mean()) for part in parts] == [0.0, 1.0]
        group.close()
    del server


def test_too_few_heads_are_refused():
    with pytest.raises(SettingsError, match="2 KV heads cannot be split over 3 ranks"):
        load(pipeline_models("llama")[0], parallel="tensor=3")


def test_norms_over_all_heads_are_refused():
    path = save(olmoe(), Path(mkdtemp(prefix="auraflux-ranks-")))
    with pytest.raises(SettingsError, match="does not support tensor parallelism: its norms of queries and keys are"):
        load(path, parallel="tensor=2")


def test_a_split_within_a_group_is_refused():
    torch.manual_seed(0)
    path = save(llama(num_attention_heads=8, num_key_value_heads=8), Path(mkdtemp(prefix="auraflux-ranks-")))
    weights = {"bits": 4, "slices": Slices(0, 8, lambda mine: mine)}
    checkpoint = open_checkpoint(path)
    config = llama_family.Config.from_hf(checkpoint.config)
    with pytest.raises(
        SettingsError, match="o_proj is quantized in groups of 64 columns, and rank 0 would have columns 0 to 16"
    ):
        llama_family.Model(config, Weights(checkpoint, llama_family.rename, **weights))
    with pytest.raises(SettingsError, match="down_proj has 320 columns in groups of 64, which cannot be split over 6 ranks"):
        Slices(0, 6, lambda mine: mine).columns(320, 64, "down_proj")


@pytest.mark.parametrize("bits", [None, 4])
def test_slices_are_those_of_the_matrix(bits: int | None):
    whole: Any = torch.randn(24, 256)
    whole = whole if bits is None else quantize(whole, bits)
    wanted = whole if bits is None else whole.dequantize(torch.float32)
    found = cut(cut(whole, range(8, 16), None), None, range(64, 192))
    assert torch.equal(found if bits is None else found.dequantize(torch.float32), wanted[8:16, 64:192])
