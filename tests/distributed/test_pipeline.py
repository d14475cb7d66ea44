"""Pipeline parallelism equals one process, bit for bit."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from auraflux.engine.engine import nbytes
from auraflux.loading.load import load
from auraflux.weights.experts.settings import ExpertSettings
from tests.distributed.threaded_ranks import decoded, threaded_ranks
from tests.models.oracles import save, tokens
from tests.models.test_deepseek_v3 import deepseek
from tests.models.test_gemma3_text import gemma
from tests.models.test_gpt_oss import gpt_oss
from tests.models.test_llama import llama
from tests.models.test_offloaded import packed
from tests.models.test_qwen3_5_moe import qwen3_5_moe
from tests.models.test_qwen3_moe import qwen3_moe

FAMILIES = {
    "llama": llama,
    "qwen3_moe": qwen3_moe,
    "qwen3_5_moe": qwen3_5_moe,
    "deepseek_v3": deepseek,
    "gpt_oss": gpt_oss,
    "gemma3_text": gemma,
}
OPTIONS: dict[str, Any] = {"context": 256, "chunk": 16, "max_sequences": 4}


@cache
def saved(name: str) -> tuple[Path, list[int]]:
    torch.manual_seed(0)
    model = FAMILIES[name]()
    return save(model, Path(mkdtemp(prefix="auraflux-ranks-"))), tokens(model, 90)


def check(path: Path, ids: list[int], size: int, **options: Any) -> None:
    """Compare ranks with one process: logits of chunked prefill, of one sequence and of four, and with a shared prefix."""
    alone = load(path, **OPTIONS, **options)
    with threaded_ranks(path, f"pipeline={size}", **OPTIONS, **options) as ranks:
        assert len(ranks.engine.ranks.layers) == size
        assert nbytes(ranks.engine.model) < nbytes(alone.engine.model)
        assert ranks.engine.cache.reserved_nbytes < alone.engine.cache.reserved_nbytes
        assert torch.equal(ranks.logits(ids[:60]), alone.logits(ids[:60]))
        for prompts in ([ids[:11]], [ids[:17], ids[5:12], ids[30:60], ids[7:8]]):
            assert torch.equal(decoded(ranks, prompts, 5), decoded(alone, prompts, 5))
        for cut in (40, 70, 33, 40):
            generated = [
                list(model.tokens(ids[:cut], max_tokens=6, temperature=0, ignore_eos=True)) for model in (ranks, alone)
            ]
            assert generated[0] == generated[1]
        assert ranks.scheduler.counts.hit_tokens == alone.scheduler.counts.hit_tokens > 0


def test_a_pipeline_of_two():
    check(*saved("qwen3_5_moe"), 2, kv="k4v4")


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["none", "k4v4"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str, size: int, kv: str):
    path, ids = saved(name)
    if size > load(path).engine.model.config.layers:
        pytest.skip("the tiny model has too few layers")
    check(path, ids, size, kv=kv)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_offloaded_experts(name: str):
    path, ids = packed(name)
    few = ExpertSettings(memory=1 << 20, io="direct")
    check(path, [*ids, *ids], 2, expert_memory=few)


@pytest.mark.slow
def test_quantized_weights_and_exact_products():
    check(*saved("llama"), 2, quantize=4, exact=True)
