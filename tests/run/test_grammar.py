"""Masks of grammars: what may come next, how a text ends, and what happens to grammars that ask too much."""

import contextlib
import json

import pytest
import tokenizers
import torch

from auraflux.errors import InputError
from auraflux.run import guidance
from auraflux.run.grammar import Grammars, Matcher, words
from auraflux.run.tokenizer import Tokenizer
from tests.run.toy_tokenizers import byte_level, gguf_metadata, sentence_piece

TOY = Tokenizer(byte_level())
ENDS = (0, 2)
# models often have more scores than tokens
WIDTH = TOY.vocab_size + 5


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOY, WIDTH, ENDS)


def allowed(matcher: Matcher) -> set[int]:
    mask = matcher.mask()
    assert mask.dtype == torch.int32
    return {n for n in range(mask.numel() * 32) if int(mask[n // 32]) >> (n % 32) & 1}


def take(matcher: Matcher, text: str) -> None:
    for token in TOY.encode(text):
        assert token in allowed(matcher)
        matcher.take(token)


def test_a_mask_has_a_bit_for_every_score(grammars: Grammars):
    matcher = grammars.matcher("start: /[ab]+/")
    assert matcher.mask().numel() == words(WIDTH) == (WIDTH + 31) // 32
    pieces = {TOY.piece(token).decode() for token in allowed(matcher)}
    assert {"a", "b"} <= pieces
    assert all(set(piece) <= {"a", "b"} for piece in pieces)


def test_scores_may_be_fewer_than_tokens():
    matcher = Grammars(TOY, 100, ENDS).matcher("start: /[ab]+/")
    assert matcher.mask().numel() == words(100)


def test_every_end_is_allowed_where_the_text_may_end(grammars: Grammars):
    matcher = grammars.matcher("start: /a+/")
    assert not allowed(matcher) & set(ENDS)
    take(matcher, "a")
    assert set(ENDS) < allowed(matcher)
    assert not matcher.done
    matcher.take(2)
    assert matcher.done


def test_when_the_grammar_is_complete_only_ends_are_left(grammars: Grammars):
    matcher = grammars.matcher('start: "a"')
    take(matcher, "a")
    assert matcher.done
    assert allowed(matcher) == set(ENDS)


def test_a_text_may_have_ends_of_its_own(grammars: Grammars):
    matcher = grammars.matcher('start: "a" <[2]> "b"', ends=[0, 1])
    take(matcher, "a")
    assert allowed(matcher) == {2}
    matcher.take(2)
    take(matcher, "b")
    assert allowed(matcher) == {0, 1}


def test_json_by_a_tokenizer_from_gguf_and_by_pieces():
    for tokenizer in (Tokenizer.from_gguf(gguf_metadata()), Tokenizer(sentence_piece(False))):
        matcher = Grammars(tokenizer, tokenizer.vocab_size, [2]).matcher('start: %json {"const": {"a": 12}}')
        text = b""
        while not matcher.done:
            fitting = [token for token in allowed(matcher) if tokenizer.piece(token).strip()]
            matcher.take(fitting[0])
            text += tokenizer.piece(fitting[0])
        assert json.loads(text) == {"a": 12}


def test_a_token_that_is_not_allowed_is_an_error(grammars: Grammars):
    matcher = grammars.matcher('start: "a"')
    with pytest.raises(InputError, match="cannot be followed further"):
        matcher.take(TOY.encode("b")[0])
    with pytest.raises(InputError, match="cannot be followed further"):
        matcher.mask()


@pytest.mark.parametrize("grammar", ['start: "a', "start: nowhere", '{"grammars": []}', "start: <|nothing|>"])
def test_a_grammar_that_cannot_be_read_is_an_error(grammars: Grammars, grammar: str):
    with pytest.raises(InputError, match="The grammar cannot be used: "):
        grammars.matcher(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        "start: /((a{1,1000}){1,1000}){1,1000}b/",
        "start: /(?s:.*)a(?s:.){4000}/",
        'start: x{1000000}\nx: "a"{100000}',
        "start: " + "|".join(f'"{n}" /{n}[^{n % 10}]{{{n},{n + 500}}}/' for n in range(2000)),
        "start: a\na: a a | a a a | " + '"a"',
    ],
)
def test_hostile_grammars_go_on_or_end_with_a_sentence(grammars: Grammars, grammar: str):
    with contextlib.suppress(InputError):
        matcher = grammars.matcher(grammar)
        for _ in range(20):
            matcher.take(min(allowed(matcher)))


def test_too_long_a_grammar_is_an_error(grammars: Grammars):
    with pytest.raises(InputError, match="characters; at most"):
        grammars.matcher("start: " + '"a" ' * 100_000)


def test_without_ends_there_are_no_grammars():
    with pytest.raises(InputError, match="no token that ends a text"):
        Grammars(TOY, WIDTH, ())


def test_a_plain_installation_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(InputError, match=r"auraflux\[serve\]"):
        guidance.guidance()


def test_the_tokenizer_gives_its_json():
    assert tokenizers.Tokenizer.from_str(TOY.json).get_vocab() == byte_level().get_vocab()
