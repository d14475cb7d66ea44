"""Prefix entries are inserted, branched from and evicted: a sequence that continues one equals a fresh cache."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from auraflux.cache import KVSequence
from auraflux.cache.prefix.prefix_cache import PrefixCache, PrefixEntry
from auraflux.errors import CacheFull
from auraflux.ops import use_backend
from tests.cache.toy import TOYS, VOCABULARY, Toy

EVERY = pytest.mark.parametrize("toy", TOYS.values(), ids=TOYS)
QUICK = settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
# shared prefixes, and how each prompt continues
STEMS = [[i * 7 % VOCABULARY for i in range(19)], [i * 3 % VOCABULARY for i in range(13)], [5]]
PROMPTS = st.builds(
    lambda stem, cut, rest: STEMS[stem][:cut] + rest,
    st.integers(0, 2),
    st.integers(0, 19),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=9),
)
# prefill a prompt and decode; finish the sequence of that number, or abort it; clear the cache
STEPS = st.one_of(
    st.tuples(st.just("start"), PROMPTS),
    st.tuples(st.sampled_from(["finish_one", "finish_one", "abort", "decode"]), st.integers(0, 3)),
    st.tuples(st.just("clear"), st.none()),
)


@pytest.fixture(autouse=True)
def _reference():
    with use_backend("reference"):
        yield


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


class Play:
    """Sequences that decode on one cache, with the tokens they should hold."""

    def __init__(self, toy: Toy, **options: int):
        self.toy, self.cache = toy, toy.cache(cached_sequences=2, **options)
        self.store = PrefixCache(self.cache)
        self.running: list[tuple[list[int], KVSequence, PrefixEntry]] = []

    def start(self, prompt: list[int]) -> None:
        if len(self.running) == 3:
            self.finish_one(0)
        _, reused, _ = self.store.match(prompt)
        hit = self.store.open(prompt)
        assert hit.hit_tokens == reused == hit.sequence.length
        assert hit.hit_tokens <= hit.shared_tokens <= len(prompt) - 1
        out = self.add(hit.sequence, prompt[hit.hit_tokens : -1], prompt[:-1])
        if out:
            hit.sequence.checkpoint()
            entry = self.store.insert_live(prompt[:-1], hit.sequence)
            self.running.append((prompt[:-1], hit.sequence, entry))
            self.decode(len(self.running) - 1, prompt[-1])
        else:
            hit.sequence.close()

    def add(self, sequence: KVSequence, new: list[int], content: list[int]) -> bool:
        """Append tokens; return False where there is no room for them."""
        try:
            out = self.toy.add(self.cache, sequence, new) if new else None
        except CacheFull:
            return False
        if out is not None:
            same(out, self.toy.fresh(content)[-len(new) :])
        return True

    def decode(self, which: int, token: int = 4) -> None:
        if self.running:
            ids, sequence, _ = self.running[which % len(self.running)]
            if self.add(sequence, [token], [*ids, token]):
                ids.append(token)

    def finish_one(self, which: int) -> None:
        if self.running:
            ids, sequence, entry = self.running.pop(which % len(self.running))
            self.store.remove(entry)
            self.store.insert(ids, sequence)

    def abort(self, which: int) -> None:
        if self.running:
            _, sequence, entry = self.running.pop(which % len(self.running))
            self.store.remove(entry)
            sequence.close()

    def clear(self, _: None) -> None:
        self.store.clear()

    def finish(self) -> None:
        while self.running:
            self.finish_one(0)
        self.store.clear()
        assert len(self.store) == 0
        assert not any(tree._root.children for tree in self.store._trees.values())
        assert self.cache.nbytes == 0
        assert list(self.cache.checkpoints) == []


@EVERY
@QUICK
@given(steps=st.lists(STEPS, min_size=4, max_size=16), page=st.integers(1, 6), scarce=st.booleans())
def test_a_cached_prefix_equals_a_computed_one(toy: Toy, steps, page: int, scarce: bool):
    # room for about two sequences, so that entries are evicted step by step
    play = Play(toy, page=page, **({"tokens": 60} if scarce else {}))
    for action, what in steps:
        getattr(play, action)(what)
    play.finish()


@EVERY
def test_a_continued_sequence_recomputes_nothing(toy: Toy):
    cache = toy.cache(cached_sequences=2)
    store, prompt = PrefixCache(cache), STEMS[0]
    start = store.open(prompt)
    toy.add(cache, start.sequence, prompt)
    store.insert(prompt, start.sequence)
    again = store.open([*prompt, 3, 1])
    assert (again.hit_tokens, again.shared_tokens) == (len(prompt), len(prompt))
    same(toy.add(cache, again.sequence, [3, 1]), toy.fresh([*prompt, 3, 1])[-2:])
    store.insert([*prompt, 3, 1], again.sequence)
    # the longer entry replaces the shorter
    assert len(store) == 1
    store.clear()
    assert cache.nbytes == 0


def test_the_least_recently_used_entry_is_evicted_first():
    toy = TOYS["dense"]
    cache = toy.cache(tokens=24, context=24)
    store, prompts = PrefixCache(cache), [[number] * 8 for number in range(3)]
    for prompt in prompts:
        start = store.open(prompt)
        toy.add(cache, start.sequence, prompt)
        store.insert(prompt, start.sequence)
    store.open([*prompts[0], 9]).sequence.close()
    needed = store.open([9] * 8)
    toy.add(cache, needed.sequence, [9] * 8)
    assert [store.match([*prompt, 9])[1] for prompt in prompts] == [8, 0, 8]
    needed.sequence.close()
    store.clear()
    assert cache.nbytes == 0


def test_a_page_shared_with_an_entry_only_is_written_in_place():
    toy = TOYS["dense"]
    cache = toy.cache(tokens=8, context=8)
    store = PrefixCache(cache)
    start = store.open([1, 2, 3])
    toy.add(cache, start.sequence, [1, 2, 3])
    store.insert([1, 2, 3], start.sequence)
    other, again = store.open([9]).sequence, store.open([1, 2, 3, 4]).sequence
    toy.add(cache, other, [9, 9, 9, 9])
    # no page is free for a copy, but none is needed once the entry is evicted
    same(toy.add(cache, again, [4]), toy.fresh([1, 2, 3, 4])[-1:])
    assert len(store) == 0


def test_the_last_token_of_a_prompt_is_never_reused():
    toy = TOYS["dense"]
    cache = toy.cache()
    store = PrefixCache(cache)
    start = store.open(STEMS[0])
    toy.add(cache, start.sequence, STEMS[0])
    store.insert(STEMS[0], start.sequence)
    assert store.match(STEMS[0])[1] == len(STEMS[0]) - 1
    assert store.match(STEMS[2])[1] == 0
