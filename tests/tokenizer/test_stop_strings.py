"""Stop strings: cut at the first, independent of increments, with minimal held-back text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auraflux.errors import InputError
from auraflux.tokenizer.stop_strings import StopStrings

WORDS = st.text("ab", min_size=1, max_size=5)


def fed(stops, pieces) -> tuple[str, str | None]:
    stopping = StopStrings(stops)
    shown = "".join(stopping.add(piece) for piece in pieces) + stopping.flush()
    return shown, stopping.stopped


def by_search(stops, text) -> tuple[str, str | None]:
    """Search by definition: the stop string that is complete first, of several the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=200)
@given(stops=st.lists(WORDS, max_size=4), pieces=st.lists(st.text("abc", max_size=6), max_size=10))
def test_cut_at_the_first(stops, pieces):
    assert fed(stops, pieces) == by_search(stops, "".join(pieces))


@settings(max_examples=100)
@given(stops=st.lists(WORDS, min_size=1, max_size=4), text=st.text("abc", max_size=20))
def test_held_back_text_is_minimal(stops, text):
    stopping, shown = StopStrings(stops), ""
    for end, letter in enumerate(text, 1):
        shown += stopping.add(letter)
        if stopping.stopped is not None:
            return
        longest = max(n for stop in stops for n in range(len(stop)) if text[:end].endswith(stop[:n]))
        assert shown == text[: end - longest]


def test_a_stop_string_may_span_increments():
    stopping = StopStrings(["</s>", "\n\nUser:"])
    assert [stopping.add(piece) for piece in ("Hi", "\n", "\nUs", "e is", "\n\nUs", "er", ":more")] == [
        "Hi", "", "", "\n\nUse is", "", "", "",
    ]  # fmt: skip
    assert stopping.stopped == "\n\nUser:"
    assert stopping.flush() == ""
    assert stopping.add("and more") == ""


def test_flush_returns_held_back_text():
    stopping = StopStrings(["stop"])
    assert stopping.add("a sto") == "a "
    assert stopping.flush() == "sto"
    assert stopping.flush() == ""
    assert stopping.stopped is None


def test_a_stop_string_within_another_is_first():
    assert fed(["bcd", "c"], ["abcd"]) == ("ab", "c")
    assert fed(["abcd", "cd"], ["xabcd"]) == ("x", "abcd")


def test_no_stop_strings():
    assert fed([], ["a", "b"]) == ("ab", None)
    assert fed("xy", ["axyb"]) == ("a", "xy")


def test_an_empty_stop_is_refused():
    with pytest.raises(InputError, match="stop string is empty"):
        StopStrings(["a", ""])


def test_the_cost_is_linear():
    """Scan text with many near matches in one pass."""
    stopping, steps = StopStrings(["a" * 5000 + "b"]), 0
    step = stopping._next

    def counted(letter: str) -> int:
        nonlocal steps
        steps += 1
        return step(letter)

    stopping._next = counted
    shown = "".join(stopping.add("a" * 10) for _ in range(1000))
    assert steps == 10_000
    assert shown + stopping.flush() == "a" * 10_000
