"""Text from tokens as they come: whole characters, the same text as all at once, the same as the tokenizers package gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auraflux.run.detokenize import Detokenizer
from tests.run.toy_tokenizers import all_toys, byte_level, sentence_piece

TOYS = sorted(all_toys())
NUMBERS = st.lists(st.integers(0, 720), max_size=40)
OCTOPUS = "🐙"


def pieces_of(tokenizer, ids, **options) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.add(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("name", TOYS)
@settings(deadline=None, max_examples=60)
@given(ids=NUMBERS)
def test_pieces_join_to_the_whole_text(name, ids):
    tokenizer = all_toys()[name]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)
    assert "".join(pieces_of(tokenizer, ids, special=True)) == tokenizer.decode(ids, special=True)


@pytest.mark.parametrize("name", TOYS)
@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=60))
def test_text_comes_back_in_whole_characters(name, text):
    tokenizer = all_toys()[name]
    pieces = pieces_of(tokenizer, tokenizer.encode(text, special=False), special=True)
    # U+FFFD is a character like others where the text has it
    assert "".join(pieces) == text
    assert pieces[-1] == ""


@settings(deadline=None, max_examples=100)
@given(ids=NUMBERS)
def test_any_bytes_read_as_the_tokenizers_package_reads_them(ids):
    model = byte_level()
    assert all_toys()["bytes"].decode(ids) == model.decode(ids, skip_special_tokens=True)
    assert all_toys()["bytes"].decode(ids, special=True) == model.decode(ids, skip_special_tokens=False)


@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=40), first_space=st.booleans())
def test_sentence_pieces_read_as_the_tokenizers_package_reads_them(text, first_space):
    model = sentence_piece(first_space)
    tokenizer = all_toys()["pieces" if first_space else "pieces, no space"]
    ids = model.encode(text).ids
    assert tokenizer.decode(ids) == model.decode(ids)


@pytest.mark.parametrize("name", TOYS)
def test_a_character_is_held_back_until_it_is_whole(name):
    tokenizer = all_toys()[name]
    ids = [token for token in tokenizer.encode(OCTOPUS, special=False) if tokenizer.piece(token) != b" "]
    assert len(ids) > 1
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add(token) for token in ids] == [""] * (len(ids) - 1) + [OCTOPUS]
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("name", TOYS)
def test_half_a_character_at_the_end_is_marked(name):
    tokenizer = all_toys()[name]
    pieces = pieces_of(tokenizer, [*tokenizer.encode("ab", special=False), *tokenizer.encode(OCTOPUS, special=False)[:-1]])
    assert "".join(pieces).lstrip().startswith("ab")
    assert pieces[-1] == "\ufffd"


def test_a_space_put_before_the_text_is_dropped_once():
    tokenizer = all_toys()["pieces"]
    ids = tokenizer.encode("the dog", special=False)
    assert "".join(pieces_of(tokenizer, ids)) == "the dog"
    assert "".join(pieces_of(tokenizer, ids, continues=True)) == " the dog"
    assert "".join(pieces_of(tokenizer, [1, *ids])) == "the dog"


def test_numbers_that_are_no_token_have_no_text():
    assert all_toys()["bytes"].decode([99999, -1, 1 << 40]) == ""


def test_time_does_not_grow_with_the_text():
    """A token costs its own bytes: nothing that was emitted is read again."""
    tokenizer = all_toys()["bytes"]

    class Counting:
        starts_with_space = False
        asked = 0

        def piece(self, token: int) -> bytes:
            Counting.asked += 1
            return tokenizer.piece(token)

        def is_special(self, token: int) -> bool:
            return False

    ids = tokenizer.encode("the lazy dog " * 500)
    assert "".join(pieces_of(Counting(), ids)) == "the lazy dog " * 500
    assert Counting.asked == len(ids)
