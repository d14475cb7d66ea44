"""A text's scores are the same bits however it is read: in pieces, beside others, after a fork, on one thread or on two."""

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
from auraflux.cache.prefix import PrefixStore
from auraflux.models import family
from auraflux.ops.simd.threads import set_threads, threads
from auraflux.run.engine import Engine
from auraflux.weights.checkpoint import open_checkpoint
from auraflux.weights.loader import Weights
from tests.models.oracles import save, tokens
from tests.models.test_replay import ALL

KVS = ("none", "k8v4", "k4v4", "k3v2")
# a few that meet every kernel; the rest is slow
QUICK = {("llama", "k4v4", False), ("qwen3_5_moe", "none", True), ("gpt_oss", "k8v4", True), ("deepseek_v3", "k8v4", False)}
QUICK |= {("deepseek_v32", "k4v4", False), ("kimi_linear", "k8v4", False)}
QUICK |= {("qwen4_exp", "k4v4", False)}
WAYS = [(name, kv, exact) for name in ALL for kv in KVS for exact in (True, False)]
SPARSE = ("deepseek_v32", "glm_moe_dsa")  # whose latents are all coded
CODED = (*SPARSE, "qwen4_exp")  # whose positions are all coded
LENGTH = 120
PIECES = (1, 7, 37, 64, 100)


@cache
def model_of(name: str) -> tuple[Any, list[Any], list[int]]:
    """A tiny model of 4-bit weights, the shapes of its layers, and a text for it."""
    torch.manual_seed(0)
    source = ALL[name]()
    checkpoint = open_checkpoint(save(source, Path(mkdtemp(prefix="auraflux-tiny-"))))
    module = family(checkpoint.config)
    config = module.Config.from_hf(checkpoint.config)
    weights = Weights(checkpoint, module.rename, bits=4, group=32)
    model = module.Model(config, weights)
    weights.done()
    return model, module.make_caches(config), tokens(source, 400)


def engine_of(name: str, kv: str, exact: bool) -> Engine:
    model, shapes, _ = model_of(name)
    if kv == "k3v2" and name in ("deepseek_v3", "kimi_linear", *SPARSE):
        kv = "k3v3"
    settings_ = CacheSettings(kv) if kv == "none" or name in CODED else CacheSettings(kv, first=1, newest=32)
    return Engine(model, shapes, settings_, context=1024, sequences=10, exact=exact, chunk=512)


def read(engine: Engine, sequence: Any, text: list[int], cuts: list[int], others: list[list[int]] | None = None) -> Tensor:
    """All scores of a text that is read in pieces of so many tokens, over and over, beside pieces of other texts."""
    beside = [engine.cache.open() for _ in others or []]
    batch, found, at, n = engine.cache.batch([sequence, *beside]), [], 0, 0
    while at < len(text):
        piece = text[at : at + cuts[n % len(cuts)]]
        ids = [piece, *[[each[(n + i) % len(each)] for i in range(1 + n % 3)] for each in others or []]]
        found.append(engine.score(engine.step(batch, ids)[: len(piece)]))
        at, n = at + len(piece), n + 1
    for each in beside:
        each.close()
    return torch.cat(found)


def alone(engine: Engine, text: list[int], cuts: list[int], others: list[list[int]] | None = None) -> Tensor:
    sequence = engine.cache.open()
    found = read(engine, sequence, text, cuts, others)
    sequence.close()
    return found


@cache
def whole(name: str, kv: str, exact: bool) -> tuple[Engine, list[int], Tensor]:
    engine, text = engine_of(name, kv, exact), model_of(name)[2][:LENGTH]
    return engine, text, alone(engine, text, [LENGTH])


def marked(way: tuple[str, str, bool]) -> Any:
    name, kv, exact = way
    marks = [] if way in QUICK else [pytest.mark.slow]
    return pytest.param(*way, id=f"{name}-{kv}-{'exact' if exact else 'fast'}", marks=marks)


every_way = pytest.mark.parametrize(("name", "kv", "exact"), [marked(way) for way in WAYS])


@every_way
def test_pieces_and_company_change_nothing(name: str, kv: str, exact: bool):
    engine, text, expected = whole(name, kv, exact)
    others = [model_of(name)[2][150 + 20 * i : 170 + 20 * i] for i in range(8)]
    for size in PIECES if (name, kv, exact) not in QUICK else (7, 64):
        assert torch.equal(alone(engine, text, [size]), expected), f"pieces of {size}"
    assert torch.equal(alone(engine, text, [1]), expected), "token by token"
    for count in (1, 3, 8):
        assert torch.equal(alone(engine, text, [37], others[:count]), expected), f"beside {count} others"
    before = threads()
    set_threads(1)
    try:
        assert torch.equal(alone(engine, text, [LENGTH]), expected), "on one thread"
        assert torch.equal(alone(engine, text, [16]), expected), "on one thread, in pieces"
    finally:
        set_threads(before)


def test_the_setting_changes_nothing_on_a_cpu():
    model, shapes, text = model_of("llama")
    same = [
        alone(Engine(model, shapes, CacheSettings("k4v4"), context=256, invariant=on), text[:50], [50]) for on in (False, True)
    ]
    assert torch.equal(*same)


@every_way
def test_forks_and_cuts_change_nothing(name: str, kv: str, exact: bool):
    engine, text, expected = whole(name, kv, exact)
    first = engine.cache.open()
    read(engine, first, text[:77], [77])
    fork = first.fork()
    # the original goes elsewhere and comes back to an odd place
    read(engine, first, text[10:20], [3])
    again = first.truncate(45)
    place = 45 - again
    assert torch.equal(read(engine, first, text[place:], [13]), expected[place:]), "after a cut"
    assert torch.equal(read(engine, fork, text[77:], [5, 1]), expected[77:]), "after a fork"
    first.close()
    fork.close()


@every_way
def test_kept_prefixes_change_nothing(name: str, kv: str, exact: bool):
    """A text that begins like one that is kept, up to the end of a page and up to an odd place."""
    engine, text, expected = whole(name, kv, exact)
    kept, store, page = engine.cache.open(), PrefixStore(engine.cache), engine.cache.page
    places = sorted((51, page if page < 100 else 64))
    for start, end in pairwise((0, *places, 100)):
        read(engine, kept, text[start:end], [end])
        kept.checkpoint()
    store.keep(text[:100], kept)
    for place in places:
        begun = store.open(text[: place + 1])
        assert begun.held == place
        assert torch.equal(read(engine, begun.sequence, text[place:], [9]), expected[place:]), f"after {place} tokens"
        begun.sequence.close()
    store.clear()


@every_way
def test_replayed_steps_change_nothing(name: str, kv: str, exact: bool):
    engine, text, expected = whole(name, kv, exact)
    sequence = engine.cache.open()
    read(engine, sequence, text[:100], [100])
    batch = engine.cache.batch([sequence])
    found = torch.cat([engine.decode(batch, [token]).clone() for token in text[100:]])
    assert torch.equal(found, expected[100:])
    sequence.close()


CUT = [("llama", "k4v4", False, 4), ("qwen3_5_moe", "none", True, 4)]
SLOWLY_CUT = [(name, kv, exact, 20) for name in ALL for kv, exact in (("k4v4", False), ("k8v4", True), ("none", True))]


@pytest.mark.parametrize(
    ("name", "kv", "exact", "examples"), [*CUT, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOWLY_CUT)]
)
def test_any_cuts_change_nothing(name: str, kv: str, exact: bool, examples: int):
    engine, text, expected = whole(name, kv, exact)
    cuts = st.lists(st.integers(1, 40), min_size=1, max_size=8)

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(cuts)
    def check(sizes: list[int]) -> None:
        assert torch.equal(alone(engine, text, sizes), expected)

    check()
