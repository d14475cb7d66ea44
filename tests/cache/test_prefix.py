"""Texts that are kept, branched from and given up: whoever goes on with one gets what a fresh cache gives."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from auraflux.cache import Sequence
from auraflux.cache.prefix import Kept, PrefixStore
from auraflux.errors import CacheFull
from auraflux.ops import use_backend
from tests.cache.toy import TOYS, VOCABULARY, Toy

EVERY = pytest.mark.parametrize("toy", TOYS.values(), ids=TOYS)
QUICK = settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
# beginnings that texts share, and how each goes on
STEMS = [[i * 7 % VOCABULARY for i in range(19)], [i * 3 % VOCABULARY for i in range(13)], [5]]
TEXTS = st.builds(
    lambda stem, cut, rest: STEMS[stem][:cut] + rest,
    st.integers(0, 2),
    st.integers(0, 19),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=9),
)
# read a text and write on; end the one of that number, or give it up; forget all that is kept
STEPS = st.one_of(
    st.tuples(st.just("begin"), TEXTS),
    st.tuples(st.sampled_from(["end", "end", "fail", "write"]), st.integers(0, 3)),
    st.tuples(st.just("clear"), st.none()),
)


@pytest.fixture(autouse=True)
def _reference():
    with use_backend("reference"):
        yield


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


class Play:
    """Texts being written on one cache, beside the tokens they should hold."""

    def __init__(self, toy: Toy, **options: int):
        self.toy, self.cache = toy, toy.cache(kept=2, **options)
        self.store = PrefixStore(self.cache)
        self.written: list[tuple[list[int], Sequence, Kept]] = []

    def begin(self, prompt: list[int]) -> None:
        if len(self.written) == 3:
            self.end(0)
        _, saved, _ = self.store.look(prompt)
        start = self.store.open(prompt)
        assert start.held == saved == start.sequence.length
        assert start.held <= start.shared <= len(prompt) - 1
        out = self.add(start.sequence, prompt[start.held : -1], prompt[:-1])
        if out:
            start.sequence.checkpoint()
            kept = self.store.note(prompt[:-1], start.sequence)
            self.written.append((prompt[:-1], start.sequence, kept))
            self.write(len(self.written) - 1, prompt[-1])
        else:
            start.sequence.close()

    def add(self, sequence: Sequence, new: list[int], whole: list[int]) -> bool:
        """Read tokens; False where there is no room for them, and nothing was read."""
        try:
            out = self.toy.add(self.cache, sequence, new) if new else None
        except CacheFull:
            return False
        if out is not None:
            same(out, self.toy.fresh(whole)[-len(new) :])
        return True

    def write(self, which: int, token: int = 4) -> None:
        if self.written:
            ids, sequence, _ = self.written[which % len(self.written)]
            if self.add(sequence, [token], [*ids, token]):
                ids.append(token)

    def end(self, which: int) -> None:
        if self.written:
            ids, sequence, kept = self.written.pop(which % len(self.written))
            self.store.forget(kept)
            self.store.keep(ids, sequence)

    def fail(self, which: int) -> None:
        if self.written:
            _, sequence, kept = self.written.pop(which % len(self.written))
            self.store.forget(kept)
            sequence.close()

    def clear(self, _: None) -> None:
        self.store.clear()

    def finish(self) -> None:
        while self.written:
            self.end(0)
        self.store.clear()
        assert len(self.store) == 0
        assert not self.store._tree._root.children
        assert self.cache.nbytes == 0
        assert list(self.cache.checkpoints) == []


@EVERY
@QUICK
@given(steps=st.lists(STEPS, min_size=4, max_size=16), page=st.integers(1, 6), scarce=st.booleans())
def test_what_is_kept_is_as_good_as_what_is_computed(toy: Toy, steps, page: int, scarce: bool):
    # room for about two texts, so that kept ones are given up piece by piece
    play = Play(toy, page=page, **({"tokens": 60} if scarce else {}))
    for action, what in steps:
        getattr(play, action)(what)
    play.finish()


@EVERY
def test_a_text_that_goes_on_needs_nothing_again(toy: Toy):
    cache = toy.cache(kept=2)
    store, text = PrefixStore(cache), STEMS[0]
    start = store.open(text)
    toy.add(cache, start.sequence, text)
    store.keep(text, start.sequence)
    again = store.open([*text, 3, 1])
    assert (again.held, again.shared) == (len(text), len(text))
    same(toy.add(cache, again.sequence, [3, 1]), toy.fresh([*text, 3, 1])[-2:])
    store.keep([*text, 3, 1], again.sequence)
    # the longer text has all of the shorter
    assert len(store) == 1
    store.clear()
    assert cache.nbytes == 0


def test_the_text_used_longest_ago_is_given_up_first():
    toy = TOYS["dense"]
    cache = toy.cache(tokens=24, context=24)
    store, texts = PrefixStore(cache), [[number] * 8 for number in range(3)]
    for text in texts:
        start = store.open(text)
        toy.add(cache, start.sequence, text)
        store.keep(text, start.sequence)
    store.open([*texts[0], 9]).sequence.close()
    needed = store.open([9] * 8)
    toy.add(cache, needed.sequence, [9] * 8)
    assert [store.look([*text, 9])[1] for text in texts] == [8, 0, 8]
    needed.sequence.close()
    store.clear()
    assert cache.nbytes == 0


def test_a_page_that_only_a_kept_text_shares_is_written_to():
    toy = TOYS["dense"]
    cache = toy.cache(tokens=8, context=8)
    store = PrefixStore(cache)
    start = store.open([1, 2, 3])
    toy.add(cache, start.sequence, [1, 2, 3])
    store.keep([1, 2, 3], start.sequence)
    other, again = store.open([9]).sequence, store.open([1, 2, 3, 4]).sequence
    toy.add(cache, other, [9, 9, 9, 9])
    # no page is free for a copy, but none is needed once nobody else has this one
    same(toy.add(cache, again, [4]), toy.fresh([1, 2, 3, 4])[-1:])
    assert len(store) == 0


def test_the_last_token_of_a_prompt_is_never_found():
    toy = TOYS["dense"]
    cache = toy.cache()
    store = PrefixStore(cache)
    start = store.open(STEMS[0])
    toy.add(cache, start.sequence, STEMS[0])
    store.keep(STEMS[0], start.sequence)
    assert store.look(STEMS[0])[1] == len(STEMS[0]) - 1
    assert store.look(STEMS[2])[1] == 0
