"""The merges of a vocabulary with scores are all cuts of a token into two, highest score first."""

import random

import pytest

from auraflux.errors import FormatError
from auraflux.tokenizer.vocabulary import scored_merges as module
from auraflux.tokenizer.vocabulary.scored_merges import scored_merges


def merges(tokens: dict[str, float]) -> list[tuple[str, str]]:
    """Cut each token everywhere, by the definition."""
    ranked = sorted(tokens, key=lambda token: -tokens[token])
    cuts = [(token[:i], token[i:]) for token in ranked for i in range(1, len(token))]
    return [(left, right) for left, right in cuts if left in tokens and right in tokens]


@pytest.mark.parametrize("letters", ["ab", "aé▁🙂", "abcdefgh"])
@pytest.mark.parametrize("count", [0, 1, 2, 30, 3000])
def test_all_cuts_in_the_order_of_scores(letters: str, count: int):
    chance = random.Random(count)
    tokens = {"".join(chance.choices(letters, k=chance.randint(1, 9))) for _ in range(count)} | set(letters[:count])
    scores = chance.sample([-0.5 * number for number in range(3 * len(tokens))], len(tokens))
    vocabulary = dict(zip(sorted(tokens), scores, strict=True))
    assert scored_merges([*vocabulary], [*vocabulary.values()]) == merges(vocabulary)


def test_the_empty_token_is_no_part():
    assert scored_merges(["", "a", "ab", "b"], [0, 0, 0, 0]) == [("a", "b")]


def test_runs_of_equal_scores_merge_halves_first():
    runs = {"▁" * length: -1.0 for length in (2, 3, 4)} | {"▁": -9.0}
    found = scored_merges([*runs], [*runs.values()])
    assert [(len(left), len(right)) for left, right in found] == [(1, 1), (2, 2), (1, 2), (2, 1), (1, 3), (3, 1)]


def test_other_tokens_of_equal_scores_are_refused():
    with pytest.raises(FormatError, match=r"'ab' and 'ba' the same score -1\.0"):
        scored_merges(["a", "b", "ab", "ba"], [0, 0, -1, -1])
    assert scored_merges(["ab", "ba"], [-1, -1]) == []


def test_strings_with_equal_hashes():
    """Polynomials modulo 2**64 of the Thue-Morse word and of its complement are equal for every odd factor."""
    word = "a"
    while len(word) < 2048:
        word += word.translate(str.maketrans("ab", "ba"))
    other = word.translate(str.maketrans("ab", "ba"))
    text = module._Text([word, other])
    assert len(set(text.hashes(*(module.np.array(each) for each in ((0, 2048), (2048, 4096)))).tolist())) == 1
    tokens = {word + "c": -1.0, other + "c": -2.0, word: -3.0, other: -4.0, "c": 0.0}
    assert scored_merges([*tokens], [*tokens.values()]) == [(word, "c"), (other, "c")]
    # without the other word, its hash is found and its characters are not
    tokens = {other + "c": -2.0, word: -3.0, "c": 0.0}
    assert scored_merges([*tokens], [*tokens.values()]) == []
