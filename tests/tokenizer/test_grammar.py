"""Token masks of grammars: allowed tokens, ends of sequences, and work limits."""

import contextlib
import json

import pytest
import tokenizers
import torch

from auraflux.errors import InputError
from auraflux.tokenizer import llguidance_limits
from auraflux.tokenizer.grammar import GrammarCompiler, Matcher, mask_words
from auraflux.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.toy_tokenizers import byte_level, gguf_metadata, sentence_piece

TOY = Tokenizer(byte_level())
ENDS = (0, 2)
# models often have more logits than tokens
WIDTH = TOY.vocab_size + 5


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(TOY, WIDTH, ENDS)


def allowed(matcher: Matcher) -> set[int]:
    mask = matcher.mask()
    assert mask.dtype == torch.int32
    return {n for n in range(mask.numel() * 32) if int(mask[n // 32]) >> (n % 32) & 1}


def take(matcher: Matcher, text: str) -> None:
    for token in TOY.encode(text):
        assert token in allowed(matcher)
        matcher.take(token)


def test_a_mask_has_a_bit_per_logit(grammars: GrammarCompiler):
    matcher = grammars.matcher("start: /[ab]+/")
    assert matcher.mask().numel() == mask_words(WIDTH) == (WIDTH + 31) // 32
    pieces = {TOY.piece(token).decode() for token in allowed(matcher)}
    assert {"a", "b"} <= pieces
    assert all(set(piece) <= {"a", "b"} for piece in pieces)


def test_fewer_logits_than_tokens():
    matcher = GrammarCompiler(TOY, 100, ENDS).matcher("start: /[ab]+/")
    assert matcher.mask().numel() == mask_words(100)


def test_end_tokens_are_allowed_where_the_grammar_accepts(grammars: GrammarCompiler):
    matcher = grammars.matcher("start: /a+/")
    assert not allowed(matcher) & set(ENDS)
    take(matcher, "a")
    assert set(ENDS) < allowed(matcher)
    assert not matcher.done
    matcher.take(2)
    assert matcher.done


def test_a_complete_grammar_allows_end_tokens_only(grammars: GrammarCompiler):
    matcher = grammars.matcher('start: "a"')
    take(matcher, "a")
    assert matcher.done
    assert allowed(matcher) == set(ENDS)


def test_a_sequence_may_have_other_end_tokens(grammars: GrammarCompiler):
    matcher = grammars.matcher('start: "a" <[2]> "b"', ends=[0, 1])
    take(matcher, "a")
    assert allowed(matcher) == {2}
    matcher.take(2)
    take(matcher, "b")
    assert allowed(matcher) == {0, 1}


def test_json_with_gguf_and_sentence_piece_tokenizers():
    for tokenizer in (Tokenizer.from_gguf(gguf_metadata()), Tokenizer(sentence_piece(False))):
        matcher = GrammarCompiler(tokenizer, tokenizer.vocab_size, [2]).matcher('start: %json {"const": {"a": 12}}')
        text = b""
        while not matcher.done:
            fitting = [token for token in allowed(matcher) if tokenizer.piece(token).strip()]
            matcher.take(fitting[0])
            text += tokenizer.piece(fitting[0])
        assert json.loads(text) == {"a": 12}


def test_a_forbidden_token_is_an_error(grammars: GrammarCompiler):
    matcher = grammars.matcher('start: "a"')
    with pytest.raises(InputError, match="The grammar failed"):
        matcher.take(TOY.encode("b")[0])
    with pytest.raises(InputError, match="The grammar failed"):
        matcher.mask()


@pytest.mark.parametrize("grammar", ['start: "a', "start: nowhere", '{"grammars": []}', "start: <|nothing|>"])
def test_an_invalid_grammar_is_an_error(grammars: GrammarCompiler, grammar: str):
    with pytest.raises(InputError, match="The grammar is invalid: "):
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
def test_hostile_grammars_run_or_fail_with_an_error(grammars: GrammarCompiler, grammar: str):
    with contextlib.suppress(InputError):
        matcher = grammars.matcher(grammar)
        for _ in range(20):
            matcher.take(min(allowed(matcher)))


def test_too_long_a_grammar_is_an_error(grammars: GrammarCompiler):
    with pytest.raises(InputError, match="characters; the limit"):
        grammars.matcher("start: " + '"a" ' * 100_000)


def test_grammars_need_end_tokens():
    with pytest.raises(InputError, match="no end-of-sequence token"):
        GrammarCompiler(TOY, WIDTH, ())


def test_a_missing_llguidance_names_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(InputError, match="pip install llguidance"):
        llguidance_limits.guidance()


def test_the_tokenizer_gives_its_json():
    assert tokenizers.Tokenizer.from_str(TOY.json).get_vocab() == byte_level().get_vocab()
