"""Pages dealt out to ranks give what all of them give in one process, but for the order in which they are joined."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from auraflux.cache import Cache, CacheSettings
from auraflux.cache.deal import Deal
from auraflux.cache.pages import PagePool
from auraflux.cache.shapes import AttentionShape, LatentShape
from auraflux.errors import CacheFull, SettingsError
from auraflux.run.language import LanguageModel
from auraflux.run.load import load
from tests.models.oracles import error, save
from tests.run.ranks.test_pipeline import OPTIONS, saved
from tests.run.ranks.together import decoded, together

ROUNDING = 1e-6  # of sums in another order
LONG = 200  # tokens: more than three pages


def check(path: Any, ids: list[int], size: int, bound: float, **options: Any) -> None:
    ids = (ids * LONG)[:LONG]
    # texts begin on the first rank, so that there must be room for the first pages of all
    options = {**OPTIONS, "context": 512, **options}
    alone = load(path, **options)
    with together(path, f"context={size}", **options) as ranks:
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
def test_every_kind_of_layer_beside_them(name: str, size: int, kv: str):
    check(*saved(name), size, ROUNDING, kv=kv, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kv", [CacheSettings("none"), CacheSettings("k4v4", first=0, newest=0)], ids=["none", "k4v4"])
def test_latents(kv: CacheSettings, size: int):
    check(*saved("deepseek_v3"), size, ROUNDING, kv=kv, exact=True)


@pytest.mark.slow
def test_rounded_activations_may_fall_to_either_side():
    check(*saved("qwen3_moe"), 2, 0.02, kv="k4v4")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (CacheSettings("k4v4", sparse_v=0.01), "leave --sparse-v out"),
        (CacheSettings("k4v4", first=65), "at most 64 first positions"),
    ],
)
def test_what_cannot_be_shared_is_refused(settings: CacheSettings, reason: str):
    deal = Deal(0, 2, lambda mine: [mine, mine])
    with pytest.raises(SettingsError, match=reason):
        Cache([AttentionShape(2, 64)], settings, context=256, deal=deal)


def test_latents_that_would_be_kept_as_they_are_are_refused():
    deal = Deal(0, 2, lambda mine: [mine, mine])
    with pytest.raises(SettingsError, match="latents keep no positions as they are among ranks"):
        Cache([LatentShape(64, 16)], CacheSettings("k4v4", newest=8), context=256, deal=deal)


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_has_its_share_of_memory(size: int):
    def made(rank: int, size: int) -> Cache:
        deal = Deal(rank, size, lambda mine: [mine])
        return Cache([AttentionShape(2, 64)], CacheSettings("none"), context=6000, tokens=6144, deal=deal)

    whole = made(0, 1).reserved_nbytes
    assert all(made(rank, size).reserved_nbytes == whole // size for rank in range(size))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_position_is_counted_once(size: int):
    ends = torch.arange(1000)
    deals = [Deal(rank, size, lambda mine: [mine]) for rank in range(size)]
    assert torch.equal(sum(deal.counted(ends, 64) for deal in deals), ends)
    assert sum(deal.owned(ends, 64).int() for deal in deals).eq(1).all()
    for deal in deals:
        # the number of a position here is how many before it are here
        assert deal.counted(ends, 64)[deal.owned(ends, 64)].tolist() == [*range(int(deal.owned(ends, 64).sum()))]


@pytest.mark.parametrize("size", [2, 3])
def test_pages_of_each_kind_run_out(size: int):
    pool = PagePool(7, size)
    assert pool.free == pool.count == -(-7 // size) * size
    taken = [pool.take(place) for place in range(pool.count)]
    assert [page % size for page in taken] == [place % size for place in range(pool.count)]
    assert pool.lack([0]) == 1
    pool.release(taken[:1])
    assert (pool.free, pool.used, pool.lack([0]), pool.lack([1]), pool.lack([size, 0])) == (1, pool.count - 1, 0, 1, 1)
    pool.release(taken[1:])
    assert (pool.free, pool.used) == (pool.count, 0)


def grown_nbytes(process: int, since: int = 0) -> int:
    """The memory of a process that is its own and in use."""
    [line] = [line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024 - since


def read_long(model: LanguageModel, ids: list[int], processes: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Read a text: the scores after it, and how much more memory each process has."""
    engine = model.engine
    # what is made once, on any rank, is made before
    for _ in range(2):
        sequence = engine.cache.open()
        for start in range(0, 3072, 1024):
            engine.read([sequence], [ids[start : start + 1024]])
        engine.decode(engine.writing([sequence]), ids[:1])
        sequence.close()
    sequence = engine.cache.open()
    engine.read([sequence], [ids[:1024]])
    before = [grown_nbytes(process) for process in processes]
    for start in range(1024, len(ids), 1024):
        engine.read([sequence], [ids[start : start + 1024]])
    found = engine.decode(engine.writing([sequence]), ids[:1]).clone()
    return found, [grown_nbytes(process, since) for process, since in zip(processes, before, strict=True)]


@pytest.mark.slow
def test_a_hundred_thousand_positions_take_half_of_the_memory_each(tmp_path: Path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 1 << 17}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
    path = save(LlamaForCausalLM(LlamaConfig(vocab_size=259, **sizes, **heads)), tmp_path)
    ids = torch.randint(0, 259, (100_000,)).tolist()
    options: dict[str, Any] = {"kv": "none", "exact": True, "context": 100_100, "chunk": 1024, "sequences": 1}
    alone = load(path, **options)
    wanted, [whole] = read_long(alone, ids, [os.getpid()])
    held = 100_000 * 2 * 64 * 4
    assert whole > 0.9 * held
    reserved = alone.engine.cache.reserved_nbytes
    del alone
    ranks = load(path, parallel="context=2", **options)
    lead: Any = ranks.engine.ranks
    try:
        found, parts = read_long(ranks, ids, [os.getpid(), lead._started[0].pid])
    finally:
        lead.close()
    assert error(found, wanted) < ROUNDING
    assert ranks.engine.cache.reserved_nbytes < 0.51 * reserved
    print(f"one process {whole / 1e6:.1f} MB, ranks {[f'{part / 1e6:.1f} MB' for part in parts]}")
    assert all(0.4 * held < part < 0.65 * held for part in parts[1:])


def test_a_text_may_fill_the_cache():
    cache = Cache([AttentionShape(1, 8)], CacheSettings("none"), context=640, tokens=640, deal=Deal(0, 2, lambda mine: [mine]))
    sequence = cache.open()
    batch = cache.batch([sequence])
    for _ in range(10):
        batch.extend([64])
    assert (sequence.length, cache.page_groups[0].free) == (640, 0)
    other = cache.open()
    with pytest.raises(CacheFull, match="1 new tokens need 1 pages of 64 tokens"):
        cache.batch([other]).extend([1])
