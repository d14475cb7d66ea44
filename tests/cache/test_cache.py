"""After any sequence of appends, truncations, forks and restores, a cache equals a fresh one with the same tokens."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from auraflux.cache import Cache, KVSequence
from auraflux.cache.kv_sequence import Checkpoint, Checkpoints
from auraflux.ops import exact, use_backend
from tests.cache import toy as toys
from tests.cache.toy import TOYS, VOCABULARY, Toy

EVERY = pytest.mark.parametrize("toy", TOYS.values(), ids=TOYS)
BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])
CHANCE = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9)
STEPS = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 7), TOKENS),
    st.tuples(st.just("truncate"), st.integers(0, 7), st.integers(0, 12)),
    st.tuples(st.sampled_from(["fork", "snapshot", "restore", "checkpoint", "close", "together"]), st.integers(0, 7), TOKENS),
)


@pytest.fixture(autouse=True)
def _reference():
    with use_backend("reference"):
        yield


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


class Play:
    """Sequences of one cache, with the tokens they should hold."""

    def __init__(self, toy: Toy, **options: int):
        self.toy, self.cache = toy, toy.cache(**options)
        self.open: list[tuple[KVSequence, list[int]]] = [(self.cache.open(), [])]
        self.saved: list[tuple[object, list[int]]] = []

    def step(self, action: str, which: int, given) -> None:
        getattr(self, action)(which % len(self.open), given)

    def append(self, which: int, tokens: list[int]) -> None:
        sequence, content = self.open[which]
        room = self.cache.context - sequence.length - 3
        if tokens[:room]:
            out = self.toy.add(self.cache, sequence, tokens[:room])
            content += tokens[:room]
            same(out, self.toy.fresh(content)[-len(out) :])

    def together(self, which: int, tokens: list[int]) -> None:
        chosen = [(s, c) for s, c in self.open if s.length < 40]
        if chosen:
            shares = [tokens[i % 3 :] for i in range(len(chosen))]
            outs = self.toy.feed(self.cache, self.cache.batch([s for s, _ in chosen]), shares)
            for (_, content), share, out in zip(chosen, shares, outs, strict=True):
                content += share
                same(out, self.toy.fresh(content)[len(content) - len(share) :] if content else out)

    def truncate(self, which: int, back: int) -> None:
        sequence, content = self.open[which]
        length = max(0, len(content) - back)
        replay = sequence.truncate(length)
        assert sequence.length == length - replay
        del content[length:]
        if replay:
            self.toy.add(self.cache, sequence, content[length - replay :])

    def fork(self, which: int, _) -> None:
        if len(self.open) < 6:
            sequence, content = self.open[which]
            self.open.append((sequence.fork(), list(content)))

    def snapshot(self, which: int, _) -> None:
        sequence, content = self.open[which]
        self.saved.append((sequence.snapshot(), list(content)))

    def restore(self, which: int, _) -> None:
        if self.saved and len(self.open) < 6:
            snapshot, content = self.saved[which % len(self.saved)]
            self.open.append((self.cache.restore(snapshot), list(content)))

    def checkpoint(self, which: int, _) -> None:
        self.open[which][0].checkpoint()

    def close(self, which: int, _) -> None:
        if len(self.open) > 1:
            self.open.pop(which)[0].close()

    def finish(self) -> None:
        """Extend each sequence once more, then close all: every page and slot is free again."""
        for sequence, content in self.open:
            assert sequence.length == len(content)
            same(self.toy.add(self.cache, sequence, [3, 1])[-2:], self.toy.fresh([*content, 3, 1])[-2:])
        for sequence, _ in self.open:
            sequence.close()
        assert self.cache.nbytes == 0
        assert list(self.cache.checkpoints) == []


@EVERY
@pytest.mark.parametrize("examples", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_any_history_equals_a_fresh_cache(toy, examples):
    @settings(CHANCE, max_examples=examples)
    @given(steps=st.lists(STEPS, min_size=3, max_size=14), page=st.integers(1, 9), rollback_tokens=st.integers(0, 6))
    def check(steps, page, rollback_tokens):
        play = Play(toy, page=page, rollback_tokens=rollback_tokens)
        for step in steps:
            play.step(*step)
        play.finish()

    check()


@EVERY
@BACKENDS
def test_prefill_chunk_sizes_do_not_matter(toy, backend):
    tokens = [i * 7 % VOCABULARY for i in range(22)]
    with use_backend(backend), exact():
        full = toy.fresh(tokens)
        for size in (1, 3, 13):
            cache = toy.cache()
            batch = cache.batch([cache.open()])
            chunks = [toy.feed(cache, batch, [tokens[i : i + size]])[0] for i in range(0, len(tokens), size)]
            same(torch.cat(chunks), full)


@EVERY
@BACKENDS
def test_a_ragged_batch_equals_its_sequences_run_separately(toy, backend):
    cache = toy.cache()
    batch = cache.batch([cache.open() for _ in range(3)])
    contents: list[list[int]] = [[], [], []]
    for step in ([[1, 2, 3, 4, 5], [6], []], [[7], [8, 9, 1, 2, 3, 4, 5, 6], [3, 3]], [[1], [2], [3]]):
        with use_backend(backend), exact():
            outs = toy.feed(cache, batch, step)
        for content, new, out in zip(contents, step, outs, strict=True):
            content += new
            if new:
                same(out, toy.fresh(content)[-len(new) :])


@EVERY
def test_batches_of_sequences_in_scattered_slots(toy):
    cache = toy.cache()
    a, b, c = (cache.open() for _ in range(3))
    toy.feed(cache, cache.batch([c, a]), [[1, 2, 3], [4, 5]])
    outs = toy.feed(cache, cache.batch([a, b, c]), [[6], [7], [8]])
    for out, content in zip(outs, ([4, 5, 6], [7], [1, 2, 3, 8]), strict=True):
        same(out, toy.fresh(content)[-1:])


@EVERY
@BACKENDS
def test_truncating_and_extending_in_one_batch(toy, backend):
    """As speculative decoding does: sequences of one batch are truncated by a few tokens and continue."""
    with use_backend(backend), exact():
        truncate_and_extend(toy)


def truncate_and_extend(toy: Toy) -> None:
    cache = toy.cache()
    sequence = cache.open()
    batch = cache.batch([sequence])
    content = list(range(10)) * 2
    toy.feed(cache, batch, [content])
    for new in ([1, 2, 3], [4, 4], [5, 6, 7]):
        sequence.checkpoint()
        toy.feed(cache, batch, [new])
        assert sequence.truncate(len(content) + 1) in (0, 1)
        replayed = [*content, new[0]][sequence.length :]
        content.append(new[0])
        if replayed:
            toy.feed(cache, batch, [replayed])
        same(toy.feed(cache, batch, [[9]])[0], toy.fresh([*content, 9])[-1:])
        content.append(9)


def wrapped(toy: Toy) -> tuple[Cache, KVSequence, list[int]]:
    cache = toy.cache()
    sequence, tokens = cache.open(), [i % VOCABULARY for i in range(30)]
    for i in range(0, 30, 5):
        toy.add(cache, sequence, tokens[i : i + 5])
    return cache, sequence, tokens


@EVERY
def test_a_snapshot_restores_in_another_cache(toy):
    cache, sequence, tokens = wrapped(toy)
    snapshot = sequence.snapshot()
    # later appends do not change the snapshot
    toy.add(cache, sequence, [1, 1, 1])
    sequence.close()
    other = toy.cache(sequences=2)
    other.open()
    restored = other.restore(snapshot)
    same(toy.add(other, restored, [4, 2]), toy.fresh([*tokens, 4, 2])[-2:])


@EVERY
def test_forks_do_not_disturb_each_other(toy):
    cache, sequence, tokens = wrapped(toy)
    forks = [sequence.fork() for _ in range(3)]
    for i, fork in enumerate(forks):
        same(toy.add(cache, fork, [i, 9, i]), toy.fresh([*tokens, i, 9, i])[-3:])
    same(toy.add(cache, sequence, [8]), toy.fresh([*tokens, 8])[-1:])
    outs = toy.feed(cache, cache.batch(forks), [[5], [5], [5]])
    for i, out in enumerate(outs):
        same(out, toy.fresh([*tokens, i, 9, i, 5])[-1:])


@EVERY
def test_a_checkpoint_can_be_rewound_to_repeatedly(toy):
    cache = toy.cache(rollback_tokens=0)
    sequence, tokens = cache.open(), [i * 3 % VOCABULARY for i in range(13)]
    toy.add(cache, sequence, tokens)
    sequence.checkpoint()
    other = sequence.fork()
    for last, size in ((4, 1), (5, 4), (6, 17)):
        for i in range(0, 17, size):
            toy.add(cache, sequence, [i % VOCABULARY] * min(size, 17 - i))
        assert sequence.truncate(13) == 0
        same(toy.add(cache, sequence, [last, last]), toy.fresh([*tokens, last, last])[-2:])
    sequence.close()
    toy.add(cache, other, [1] * 20)
    assert other.truncate(13) == 0
    same(toy.add(cache, other, [2, 3]), toy.fresh([*tokens, 2, 3])[-2:])
    other.close()
    assert cache.nbytes == 0


@EVERY
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_extreme_vectors_give_finite_outputs(toy, scale, monkeypatch):
    original = toys.vectors
    # gates, queries and convolution weights are not scaled
    monkeypatch.setattr(
        toys, "vectors", lambda seed, *shape: original(seed, *shape) * (scale if seed in (1, 2, 4, 5, 11) else 1.0)
    )
    for tokens in ([5], [1, 2, 3] * 6):
        assert toy.fresh(tokens).isfinite().all()


def test_checkpoint_bytes_are_counted_incrementally():
    """The least recently used ones are dropped first, and the running total stays right."""
    released: list[int] = []
    store = Checkpoints(None, 10)
    saved = [SimpleNamespace(nbytes=n, release=lambda n=n: released.append(n)) for n in range(1, 6)]
    made: list[Any] = [Checkpoint(each.nbytes, {"group": each, "other": None}) for each in saved]
    for checkpoint in made[:4]:
        store.add(checkpoint)
    assert store.nbytes == sum(checkpoint.nbytes for checkpoint in store) == 10
    store.touch(made[0])
    store.add(made[4])
    assert released == [2, 3]
    assert [checkpoint.position for checkpoint in store] == [4, 1, 5]
    store.release(made[3])
    assert made[3] not in store
    assert store.nbytes == sum(checkpoint.nbytes for checkpoint in store) == 6
