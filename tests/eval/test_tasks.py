"""Windows, copies and needles, on scorers with known likelihoods."""

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.eval.metrics import summary
from auraflux.eval.needle import DEPTHS, haystack, recall
from auraflux.eval.scorer import differences
from auraflux.eval.text import LEAD, Passage, Text, copies, tokenized, windows
from auraflux.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.toy_tokenizers import CHATML, byte_level

VOCAB = 1000
TEXT = Text("a.txt", tuple(range(900)), (900, 901))


class CopyingScorer:
    """A scorer that finds the successor of the token's last occurrence `sure` times as likely as any other token."""

    def __init__(self, sure: float):
        self.sure = sure

    def logits(self, ids: Sequence[int], start: int) -> Iterator[Tensor]:
        seen: dict[int, int] = {}
        rows = torch.zeros(len(ids), VOCAB)
        for at, token in enumerate(ids):
            if token in seen:
                rows[at, seen[token]] = math.log(self.sure)
            if at + 1 < len(ids):
                seen[token] = ids[at + 1]
        yield from rows[start:].split(64)

    def likelihoods(self, prompt: Sequence[int], endings: Sequence[Sequence[int]], shared: int) -> list[float]:
        """Return log(sure) for endings that occur in the prompt, 0 for others."""
        text = " ".join(map(str, prompt))
        return [math.log(self.sure if " ".join(map(str, ending)) in text else 1.0) for ending in endings]


def test_windows_are_consecutive_and_start_with_the_prefix():
    found = windows([TEXT], 102, None)
    assert [passage.ids[:3] for passage in found] == [(900, 901, start) for start in range(0, 900, 100)]
    assert {(len(passage.ids), passage.first, passage.measured) for passage in found} == {(102, 2, 100)}
    assert [passage.name for passage in windows([TEXT], 102, 3)] == ["a.txt:0", "a.txt:300", "a.txt:600"]


def test_short_files_are_refused():
    with pytest.raises(InputError, match=r"a.txt has 900 tokens, fewer than one window of 1024"):
        windows([TEXT], 1024, 1)
    with pytest.raises(InputError, match="a window of 3 tokens is too short"):
        windows([TEXT], 3, 1)
    with pytest.raises(InputError, match="no text has the 1000 tokens that copying needs"):
        copies([TEXT], [1000], 128)
    with pytest.raises(InputError, match="overlaps its passage"):
        copies([TEXT], [100], 128)


def test_the_second_copy_is_measured():
    passage = copies([TEXT], [300], 128)[300]
    assert passage.ids == (900, 901, *range(300), *range(128))
    assert passage.measured == 128 - LEAD
    sure, unsure = CopyingScorer(1e6), CopyingScorer(2.0)
    found = differences(sure, {"sure": sure, "unsure": unsure}, passage)
    assert summary(found["sure"])["perplexity"] == pytest.approx((1e6 + VOCAB - 1) / 1e6, rel=1e-5)
    assert summary(found["unsure"])["perplexity"] == pytest.approx((2 + VOCAB - 1) / 2)
    assert found["sure"].kl == [0.0] * (128 - LEAD)
    p, q = 1e6 / (1e6 + VOCAB - 1), 2 / (VOCAB + 1)
    wanted = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert found["unsure"].kl == pytest.approx([wanted] * (128 - LEAD), rel=1e-4)


def test_only_tokens_from_the_first_measured_one_count():
    scorer = CopyingScorer(2.0)
    found = differences(scorer, {"": scorer}, Passage("x", tuple(range(200)), 150))[""]
    assert len(found.nll) == 50
    assert found.nll == pytest.approx([math.log(VOCAB)] * 50)


def toy() -> Tokenizer:
    return Tokenizer(byte_level(), templates={"default": CHATML})


def test_needles_are_at_their_depths_and_one_value_is_right():
    tokenizer = toy()
    text = tokenized({"dog": "The lazy dog sleeps. " * 400}, tokenizer, chat=False)[0]
    hidden = haystack(text, tokenizer, 800, rotation=1)
    assert len(hidden.prompt) == 800
    context = tokenizer.decode(hidden.prompt)
    assert "The secret word of the Old Mill is marble." in context
    facts = zip(hidden.endings, hidden.right, strict=True)
    places = [context.index(tokenizer.decode(endings[right]).strip()) / len(context) for endings, right in facts]
    assert places == pytest.approx(DEPTHS, abs=0.15)
    # of five values one is nine times as likely as any other
    assert recall(CopyingScorer(9.0), hidden) == pytest.approx([9 / 13] * len(DEPTHS))
    assert recall(CopyingScorer(1.0), hidden) == pytest.approx([1 / 5] * len(DEPTHS))


def test_a_needle_needs_room():
    tokenizer = toy()
    with pytest.raises(InputError, match=r"a needle test of 20 tokens has no room for text: its facts need \d+\."):
        haystack(TEXT, tokenizer, 20, 0)
    with pytest.raises(InputError, match=r"a needle test of 20000 tokens needs \d+ tokens of text, and .* has \d+\."):
        haystack(TEXT, tokenizer, 20000, 0)


def test_chat_format_starts_with_a_question():
    tokenizer = toy()
    text = tokenized({"dog": "The lazy dog."}, tokenizer, chat=True)[0]
    assert tokenizer.decode(text.prefix, special=True).endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(text.ids) == "The lazy dog."
