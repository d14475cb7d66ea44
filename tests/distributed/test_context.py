"""Context parallelism equals one process up to the order in which partial attention is merged."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from auraflux.cache import Cache, CacheSettings
from auraflux.cache.layer_shapes import AttentionShape, LatentShape, SparseLatentShape
from auraflux.cache.page_pool import PagePool
from auraflux.cache.page_shards import PageShard
from auraflux.errors import CacheFull, SettingsError
from auraflux.loading.language_model import LanguageModel
from auraflux.loading.load import load
from tests.distributed.test_pipeline import OPTIONS, saved
from tests.distributed.threaded_ranks import decoded, threaded_ranks
from tests.models.oracles import error, save

ROUNDING = 1e-6  # of another order of summation
LONG = 200  # tokens: more than three pages


def check(path: Any, ids: list[int], size: int, bound: float, **options: Any) -> None:
    ids = (ids * LONG)[:LONG]
    # every sequence begins on the first rank, which needs room for the first pages of all
    options = {**OPTIONS, "context": 512, **options}
    alone = load(path, **options)
    with threaded_ranks(path, f"context={size}", **options) as ranks:
        assert error(ranks.logits(ids), alone.logits(ids)) < bound
        for prompts in ([ids[:70]], [ids[:134], ids[5:12], ids[3:190], ids[7:8]]):
            assert error(decoded(ranks, prompts, 4), decoded(alone, prompts, 4)) < bound
        first, again = (ranks.logits(ids[:100]) for _ in range(2))
        assert torch.equal(first, again)


@pytest.mark.parametrize("kv", ["none", "k4v4"])
def test_pages_of_two_ranks(kv: str):
    check(*saved("llama"), 2, ROUNDING, kv=kv, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["none", "k4v4"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen3_5_moe", "gpt_oss", "gemma3_text"])
def test_every_kind_of_layer(name: str, size: int, kv: str):
    check(*saved(name), size, ROUNDING, kv=kv, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "kv", [CacheSettings("none"), CacheSettings("k4v4", sink_tokens=0, recent_window=0)], ids=["none", "k4v4"]
)
def test_latents(kv: CacheSettings, size: int):
    check(*saved("deepseek_v3"), size, ROUNDING, kv=kv, exact=True)


@pytest.mark.slow
def test_quantized_activations_may_round_either_way():
    check(*saved("qwen3_moe"), 2, 0.02, kv="k4v4")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (CacheSettings("k4v4", sparse_v=0.01), "--sparse-v is not supported with context parallelism"),
        (CacheSettings("k4v4", sink_tokens=65), "at most 64 sink tokens"),
    ],
)
def test_unsupported_settings_are_refused(settings: CacheSettings, reason: str):
    page_shard = PageShard(0, 2, lambda mine: [mine, mine])
    with pytest.raises(SettingsError, match=reason):
        Cache([AttentionShape(2, 64)], settings, context=256, page_shard=page_shard)


def test_full_precision_latents_are_refused():
    page_shard = PageShard(0, 2, lambda mine: [mine, mine])
    with pytest.raises(SettingsError, match="context-parallel latents have no full-precision window"):
        Cache([LatentShape(64, 16)], CacheSettings("k4v4", recent_window=8), context=256, page_shard=page_shard)


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_stores_its_share_of_pages(size: int):
    def made(rank: int, size: int) -> Cache:
        page_shard = PageShard(rank, size, lambda mine: [mine])
        return Cache([AttentionShape(2, 64)], CacheSettings("none"), context=6000, tokens=6144, page_shard=page_shard)

    whole = made(0, 1).reserved_nbytes
    assert all(made(rank, size).reserved_nbytes == whole // size for rank in range(size))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_position_is_counted_once(size: int):
    ends = torch.arange(1000)
    shards = [PageShard(rank, size, lambda mine: [mine]) for rank in range(size)]
    assert torch.equal(sum(page_shard.local_lengths(ends, 64) for page_shard in shards), ends)
    assert sum(page_shard.owns(ends, 64).int() for page_shard in shards).eq(1).all()
    for page_shard in shards:
        # the local index of a position is the number of local positions before it
        assert page_shard.local_lengths(ends, 64)[page_shard.owns(ends, 64)].tolist() == [
            *range(int(page_shard.owns(ends, 64).sum()))
        ]


@pytest.mark.parametrize("size", [2, 3])
def test_pages_of_each_kind_run_out(size: int):
    pool = PagePool(7, size)
    assert pool.free == pool.count == -(-7 // size) * size
    taken = [pool.allocate(index) for index in range(pool.count)]
    assert [page % size for page in taken] == [index % size for index in range(pool.count)]
    assert pool.shortfall([0]) == 1
    pool.release(taken[:1])
    assert (pool.free, pool.used, pool.shortfall([0]), pool.shortfall([1]), pool.shortfall([size, 0])) == (
        1,
        pool.count - 1,
        0,
        1,
        1,
    )
    pool.release(taken[1:])
    assert (pool.free, pool.used) == (pool.count, 0)


def grown_nbytes(process: int, since: int = 0) -> int:
    """Return the private resident memory of a process, in bytes."""
    [line] = [line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024 - since


def read_long(model: LanguageModel, ids: list[int], processes: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Prefill a prompt; return its last logits and the memory growth of each process."""
    engine = model.engine
    # allocate everything that is allocated once
    for _ in range(2):
        sequence = engine.cache.open()
        for start in range(0, 3072, 1024):
            engine.prefill([sequence], [ids[start : start + 1024]])
        engine.decode(engine.decode_batch([sequence]), ids[:1])
        sequence.close()
    sequence = engine.cache.open()
    engine.prefill([sequence], [ids[:1024]])
    before = [grown_nbytes(process) for process in processes]
    for start in range(1024, len(ids), 1024):
        engine.prefill([sequence], [ids[start : start + 1024]])
    found = engine.decode(engine.decode_batch([sequence]), ids[:1]).clone()
    return found, [grown_nbytes(process, since) for process, since in zip(processes, before, strict=True)]


@pytest.mark.slow
def test_a_hundred_thousand_positions_take_half_of_the_memory_each(tmp_path: Path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 1 << 17}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
    path = save(LlamaForCausalLM(LlamaConfig(vocab_size=259, **sizes, **heads)), tmp_path)
    ids = torch.randint(0, 259, (100_000,)).tolist()
    options: dict[str, Any] = {"kv": "none", "exact": True, "context": 100_100, "chunk": 1024, "max_sequences": 1}
    alone = load(path, **options)
    wanted, [whole] = read_long(alone, ids, [os.getpid()])
    held = 100_000 * 2 * 64 * 4
    assert whole > 0.9 * held
    reserved = alone.engine.cache.reserved_nbytes
    del alone
    ranks = load(path, parallel="context=2", **options)
    leader: Any = ranks.engine.ranks
    try:
        found, parts = read_long(ranks, ids, [os.getpid(), leader.launcher.processes[0].pid])
    finally:
        leader.close()
    assert error(found, wanted) < ROUNDING
    assert ranks.engine.cache.reserved_nbytes < 0.51 * reserved
    print(f"one process {whole / 1e6:.1f} MB, ranks {[f'{part / 1e6:.1f} MB' for part in parts]}")
    assert all(0.4 * held < part < 0.65 * held for part in parts[1:])


def test_a_sequence_may_fill_the_cache():
    cache = Cache(
        [AttentionShape(1, 8)], CacheSettings("none"), context=640, tokens=640, page_shard=PageShard(0, 2, lambda mine: [mine])
    )
    sequence = cache.open()
    batch = cache.batch([sequence])
    for _ in range(10):
        batch.extend([64])
    assert (sequence.length, cache.page_groups[0].free) == (640, 0)
    other = cache.open()
    with pytest.raises(CacheFull, match="1 new tokens need 1 pages of 64 tokens"):
        cache.batch([other]).extend([1])


def test_sparse_latents_are_refused():
    shapes, page_shard = [SparseLatentShape(32, 8, 16, 40)], PageShard(0, 2, lambda mine: [mine, mine])
    with pytest.raises(SettingsError, match="sparse latent attention does not support context parallelism"):
        Cache(shapes, CacheSettings("none"), context=640, tokens=640, page_shard=page_shard)
