"""Incremental detokenization: complete characters, equal to decoding at once and to the tokenizers package."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auraflux.tokenizer.detokenizer import Detokenizer
from tests.tokenizer.toy_tokenizers import all_toys, byte_level, sentence_piece

TOYS = sorted(all_toys())
NUMBERS = st.lists(st.integers(0, 720), max_size=40)
OCTOPUS = "🐙"


def pieces_of(tokenizer, ids, **options) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.add(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("name", TOYS)
@settings(deadline=None, max_examples=60)
@given(ids=NUMBERS)
def test_increments_join_to_the_full_text(name, ids):
    tokenizer = all_toys()[name]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)
    assert "".join(pieces_of(tokenizer, ids, special=True)) == tokenizer.decode(ids, special=True)


@pytest.mark.parametrize("name", TOYS)
@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=60))
def test_increments_are_complete_characters(name, text):
    tokenizer = all_toys()[name]
    pieces = pieces_of(tokenizer, tokenizer.encode(text, special=False), special=True)
    # U+FFFD may also be part of the text
    assert "".join(pieces) == text
    assert pieces[-1] == ""


@settings(deadline=None, max_examples=100)
@given(ids=NUMBERS)
def test_any_bytes_equal_the_tokenizers_package(ids):
    model = byte_level()
    assert all_toys()["bytes"].decode(ids) == model.decode(ids, skip_special_tokens=True)
    assert all_toys()["bytes"].decode(ids, special=True) == model.decode(ids, skip_special_tokens=False)


@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=40), first_space=st.booleans())
def test_sentence_piece_equals_the_tokenizers_package(text, first_space):
    model = sentence_piece(first_space)
    tokenizer = all_toys()["pieces" if first_space else "pieces, no space"]
    ids = model.encode(text).ids
    assert tokenizer.decode(ids) == model.decode(ids)


@pytest.mark.parametrize("name", TOYS)
def test_a_character_is_held_back_until_complete(name):
    tokenizer = all_toys()[name]
    ids = [token for token in tokenizer.encode(OCTOPUS, special=False) if tokenizer.piece(token) != b" "]
    assert len(ids) > 1
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add(token) for token in ids] == [""] * (len(ids) - 1) + [OCTOPUS]
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("name", TOYS)
def test_an_incomplete_last_character_is_replaced(name):
    tokenizer = all_toys()[name]
    pieces = pieces_of(tokenizer, [*tokenizer.encode("ab", special=False), *tokenizer.encode(OCTOPUS, special=False)[:-1]])
    assert "".join(pieces).lstrip().startswith("ab")
    assert pieces[-1] == "\ufffd"


def test_the_prefix_space_is_stripped_once():
    tokenizer = all_toys()["pieces"]
    ids = tokenizer.encode("the dog", special=False)
    assert "".join(pieces_of(tokenizer, ids)) == "the dog"
    assert "".join(pieces_of(tokenizer, ids, continues=True)) == " the dog"
    assert "".join(pieces_of(tokenizer, [1, *ids])) == "the dog"


def test_unknown_ids_have_no_text():
    assert all_toys()["bytes"].decode([99999, -1, 1 << 40]) == ""


def test_the_cost_per_token_is_constant():
    """Each token is decoded once."""
    tokenizer = all_toys()["bytes"]

    class Counting:
        starts_with_space = False
        calls = 0

        def piece(self, token: int) -> bytes:
            Counting.calls += 1
            return tokenizer.piece(token)

        def is_special(self, token: int) -> bool:
            return False

    ids = tokenizer.encode("the lazy dog " * 500)
    assert "".join(pieces_of(Counting(), ids)) == "the lazy dog " * 500
    assert Counting.calls == len(ids)
