"""Logits are bit-identical for any chunking, batch, fork or number of threads."""

from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from auraflux.cache import CacheSettings
from auraflux.cache.prefix.prefix_cache import PrefixCache
from auraflux.engine.engine import Engine
from auraflux.models import family
from auraflux.ops.simd.threads import set_threads, threads
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.loader import Weights
from tests.models.oracles import save, tokens
from tests.models.test_deepseek_v4 import deepseek as deepseek_v4
from tests.models.test_ernie4_5_moe import ernie
from tests.models.test_graphs import ALL

FAMILIES = ALL | {"deepseek_v4": deepseek_v4, "ernie4_5_moe": ernie}
KVS = ("none", "k8v4", "k4v4", "k3v2")
# a few that reach every kernel; the rest is slow
QUICK = {("llama", "k4v4", False), ("qwen3_5_moe", "none", True), ("gpt_oss", "k8v4", True), ("deepseek_v3", "k8v4", False)}
QUICK |= {("deepseek_v32", "k4v4", False), ("kimi_linear", "k8v4", False)}
QUICK |= {("qwen4_exp", "k4v4", False)}
WAYS = [(name, kv, exact) for name in ALL for kv in KVS for exact in (True, False)]
SPARSE = ("deepseek_v32", "glm_moe_dsa")  # without full-precision window
QUANTIZED = (*SPARSE, "qwen4_exp")  # without full-precision window
LENGTH = 120
CHUNKS = (1, 7, 37, 64, 100)


@cache
def model_of(name: str) -> tuple[Any, list[Any], list[int]]:
    """Return a tiny model of 4-bit weights, its cache shapes, and tokens for it."""
    torch.manual_seed(0)
    source = FAMILIES[name]()
    checkpoint = open_checkpoint(save(source, Path(mkdtemp(prefix="auraflux-tiny-"))))
    module = family(checkpoint.config)
    config = module.Config.from_hf(checkpoint.config)
    weights = Weights(checkpoint, module.rename, bits=4, group=32)
    model = module.Model(config, weights)
    weights.check_loaded()
    return model, module.make_caches(config), tokens(source, 400)


def engine_of(name: str, kv: str, exact: bool) -> Engine:
    model, shapes, _ = model_of(name)
    if kv == "k3v2" and name in ("deepseek_v3", "kimi_linear", *SPARSE):
        kv = "k3v3"
    settings_ = CacheSettings(kv) if kv == "none" or name in QUANTIZED else CacheSettings(kv, sink_tokens=1, recent_window=32)
    return Engine(model, shapes, settings_, context=1024, sequences=10, exact=exact, chunk=512)


def compute(engine: Engine, sequence: Any, ids: list[int], cuts: list[int], others: list[list[int]] | None = None) -> Tensor:
    """Return all logits of tokens computed in chunks of these sizes, repeated, batched with chunks of other sequences."""
    neighbours = [engine.cache.open() for _ in others or []]
    batch, found, at, n = engine.cache.batch([sequence, *neighbours]), [], 0, 0
    while at < len(ids):
        chunk = ids[at : at + cuts[n % len(cuts)]]
        step_ids = [chunk, *[[each[(n + i) % len(each)] for i in range(1 + n % 3)] for each in others or []]]
        found.append(engine.compute_logits(engine.step(batch, step_ids)[: len(chunk)]))
        at, n = at + len(chunk), n + 1
    for each in neighbours:
        each.close()
    return torch.cat(found)


def alone(engine: Engine, ids: list[int], cuts: list[int], others: list[list[int]] | None = None) -> Tensor:
    sequence = engine.cache.open()
    found = compute(engine, sequence, ids, cuts, others)
    sequence.close()
    return found


@cache
def reference(name: str, kv: str, exact: bool) -> tuple[Engine, list[int], Tensor]:
    engine, ids = engine_of(name, kv, exact), model_of(name)[2][:LENGTH]
    return engine, ids, alone(engine, ids, [LENGTH])


def marked(way: tuple[str, str, bool]) -> Any:
    name, kv, exact = way
    marks = [] if way in QUICK else [pytest.mark.slow]
    return pytest.param(*way, id=f"{name}-{kv}-{'exact' if exact else 'fast'}", marks=marks)


every_way = pytest.mark.parametrize(("name", "kv", "exact"), [marked(way) for way in WAYS])


@every_way
def test_chunks_and_batches_change_nothing(name: str, kv: str, exact: bool):
    engine, ids, expected = reference(name, kv, exact)
    others = [model_of(name)[2][150 + 20 * i : 170 + 20 * i] for i in range(8)]
    for size in CHUNKS if (name, kv, exact) not in QUICK else (7, 64):
        assert torch.equal(alone(engine, ids, [size]), expected), f"chunks of {size}"
    assert torch.equal(alone(engine, ids, [1]), expected), "token by token"
    for count in (1, 3, 8):
        assert torch.equal(alone(engine, ids, [37], others[:count]), expected), f"with {count} others"
    before = threads()
    set_threads(1)
    try:
        assert torch.equal(alone(engine, ids, [LENGTH]), expected), "on one thread"
        assert torch.equal(alone(engine, ids, [16]), expected), "on one thread, in chunks"
    finally:
        set_threads(before)


def test_the_setting_changes_nothing_on_a_cpu():
    model, shapes, ids = model_of("llama")
    same = [
        alone(Engine(model, shapes, CacheSettings("k4v4"), context=256, invariant=on), ids[:50], [50]) for on in (False, True)
    ]
    assert torch.equal(*same)


@every_way
def test_forks_and_truncation_change_nothing(name: str, kv: str, exact: bool):
    engine, ids, expected = reference(name, kv, exact)
    first = engine.cache.open()
    compute(engine, first, ids[:77], [77])
    fork = first.fork()
    # the original diverges and is truncated to an odd length
    compute(engine, first, ids[10:20], [3])
    again = first.truncate(45)
    place = 45 - again
    assert torch.equal(compute(engine, first, ids[place:], [13]), expected[place:]), "after truncation"
    assert torch.equal(compute(engine, fork, ids[77:], [5, 1]), expected[77:]), "after a fork"
    first.close()
    fork.close()


@every_way
def test_prefix_hits_change_nothing(name: str, kv: str, exact: bool):
    """A prompt that shares a prefix up to the end of a page, and up to an odd length."""
    engine, ids, expected = reference(name, kv, exact)
    parent, store, page = engine.cache.open(), PrefixCache(engine.cache), engine.cache.page
    places = sorted((51, page if page < 100 else 64))
    for start, end in pairwise((0, *places, 100)):
        compute(engine, parent, ids[start:end], [end])
        parent.checkpoint()
    store.insert(ids[:100], parent)
    for place in places:
        begun = store.open(ids[: place + 1])
        assert begun.hit_tokens == place
        assert torch.equal(compute(engine, begun.sequence, ids[place:], [9]), expected[place:]), f"after {place} tokens"
        begun.sequence.close()
    store.clear()


@every_way
def test_replayed_steps_change_nothing(name: str, kv: str, exact: bool):
    engine, ids, expected = reference(name, kv, exact)
    sequence = engine.cache.open()
    compute(engine, sequence, ids[:100], [100])
    batch = engine.cache.batch([sequence])
    found = torch.cat([engine.decode(batch, [token]).clone() for token in ids[100:]])
    assert torch.equal(found, expected[100:])
    sequence.close()


PROMPTS, STEPS = (61, 5, 33), 14  # tokens; the first decodes over the end of a page


@pytest.mark.parametrize("name", FAMILIES)
def test_decode_is_batch_invariant(name: str):
    """Decode one, two and three sequences: each gets the logits that a prefill of all its tokens gives."""
    engine, ids = engine_of(name, "none", False), model_of(name)[2]
    sources = [ids[40 * i : 40 * i + length + STEPS] for i, length in enumerate(PROMPTS)]
    expected = [alone(engine, source, [len(source)])[-STEPS:] for source in sources]
    for count in (1, 2, 3):
        sequences = [engine.cache.open() for _ in sources[:count]]
        for sequence, source in zip(sequences, sources, strict=False):
            compute(engine, sequence, source[:-STEPS], [len(source)])
        batch = engine.cache.batch(sequences)
        for step in range(STEPS):
            found = engine.decode(batch, [source[step - STEPS] for source in sources[:count]])
            wanted = torch.stack([logits[step] for logits in expected[:count]])
            assert torch.equal(found, wanted), f"step {step} of a batch of {count}"
        for sequence in sequences:
            sequence.close()


CUT = [("llama", "k4v4", False, 4), ("qwen3_5_moe", "none", True, 4)]
SLOWLY_CUT = [(name, kv, exact, 20) for name in ALL for kv, exact in (("k4v4", False), ("k8v4", True), ("none", True))]


@pytest.mark.parametrize(
    ("name", "kv", "exact", "examples"), [*CUT, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOWLY_CUT)]
)
def test_any_chunks_change_nothing(name: str, kv: str, exact: bool, examples: int):
    engine, ids, expected = reference(name, kv, exact)
    cuts = st.lists(st.integers(1, 40), min_size=1, max_size=8)

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(cuts)
    def check(sizes: list[int]) -> None:
        assert torch.equal(alone(engine, ids, sizes), expected)

    check()
