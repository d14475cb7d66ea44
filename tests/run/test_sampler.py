"""Sampling: settings that are refused, greedy, seeds, penalties, and that neighbours do not matter."""

import math

import pytest
import torch

from auraflux.errors import InputError
from auraflux.ops.sample.reference import sample
from auraflux.run.sampler import Row, Sampler
from auraflux.run.sampling import Sampling

VOCABULARY = 50


def scores(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def text_of(sampling: Sampling, steps: int = 12, prompt=()) -> list[int]:
    """The tokens a sequence gets when it is alone; step i has the scores of seed i."""
    row = Row(sampling, prompt)
    sampler = Sampler([row])
    for step in range(steps):
        row.take(int(sampler(scores(1, step))))
    return row.text


def test_a_token_that_was_not_taken_is_chosen_again():
    row = Row(Sampling(temperature=1.5, frequency_penalty=0.5, seed=7))
    chosen = [int(Sampler([row])(scores(1))), (row.renew(), int(Sampler([row])(scores(1))))[1]]
    assert chosen[0] == chosen[1]
    row.take(chosen[0])
    assert row.uniform() != row._drawn[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("seed", -1),
        ("seed", 1.0),
        ("max_tokens", 0),
        ("stop", ("a", "")),
        ("stop", (3,)),
    ],
)
def test_settings_that_mean_nothing_are_refused(name, value):
    with pytest.raises(InputError, match=f"^{name}="):
        Sampling(**{name: value})


def test_one_stop_string_may_stand_alone():
    assert Sampling(stop="end").stop == ("end",)
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")
    assert Sampling(stop=None).stop == ()


def test_greedy_takes_the_likeliest():
    logits = scores(3)
    assert Sampler([Row(Sampling())] * 3)(logits).equal(logits.argmax(-1))
    assert Sampler([Row(Sampling(temperature=1.0, top_k=1, seed=1))] * 3)(logits).equal(logits.argmax(-1))
    logits[1, 5] = logits[1, 9] = 100.0
    assert Sampler([Row(Sampling())] * 3)(logits)[1] == 5


def test_greedy_makes_no_copy_of_the_scores(monkeypatch):
    def fail(*args):
        raise AssertionError("called")

    def first(given, *settings):
        assert given is logits
        return sample(given, *settings)

    logits = scores(1)
    monkeypatch.setattr("auraflux.run.sampler.sample", first)
    monkeypatch.setattr("auraflux.run.sampler.penalize", fail)
    assert Sampler([Row(Sampling(), [1, 2])])(logits).dtype == torch.int64


def test_the_same_seed_gives_the_same_text():
    hot = Sampling(temperature=1.5, seed=7)
    assert text_of(hot) == text_of(hot)
    assert text_of(hot) != text_of(Sampling(temperature=1.5, seed=8))
    assert text_of(Sampling(temperature=1.5), 30) != text_of(Sampling(temperature=1.5), 30)


MIXED = [
    Sampling(),
    Sampling(temperature=1.2, seed=3),
    Sampling(temperature=0.8, top_k=5, top_p=0.9, min_p=0.02, seed=4, repetition_penalty=1.3),
    Sampling(presence_penalty=0.7, frequency_penalty=0.4),
]
PROMPTS = [(1, 2), (3,), (4, 4, 5), (6,)]


def test_neighbours_do_not_matter():
    """Rows come and go, and each gets what it gets alone."""
    alone = [text_of(sampling, 12, prompt) for sampling, prompt in zip(MIXED, PROMPTS, strict=True)]
    rows = [Row(sampling, prompt) for sampling, prompt in zip(MIXED, PROMPTS, strict=True)]
    texts: list[list[int]] = [[], [], [], []]
    for members in ([0, 1, 2, 3], [3, 1], [2], [0, 2, 1], [2, 3, 0]):
        sampler = Sampler([rows[member] for member in members])
        for _ in range(2):
            logits = torch.cat([scores(1, len(texts[member])) for member in members])
            for member, token in zip(members, sampler(logits).tolist(), strict=True):
                texts[member].append(token)
                rows[member].take(token)
    assert [text == whole[: len(text)] for text, whole in zip(texts, alone, strict=True)] == [True] * 4
    assert min(map(len, texts)) >= 6


def test_all_scores_but_the_row_s_own_stay_as_they_are():
    logits = scores(2)
    before = logits.clone()
    Sampler([Row(Sampling(repetition_penalty=2.0), [0, 1]), Row(Sampling())])(logits)
    assert logits.equal(before)


def test_penalties_count_what_was_generated():
    flat = torch.zeros(1, VOCABULARY)
    flat[0, :3] = torch.tensor([1.0, 0.9, 0.8])
    presence = Sampler([Row(Sampling(presence_penalty=0.15))])
    assert [int(presence(flat)) for _ in range(5)] == [0, 1, 0, 0, 0]
    frequency = Sampler([Row(Sampling(frequency_penalty=0.15))])
    assert [int(frequency(flat)) for _ in range(6)] == [0, 1, 0, 2, 1, 0]


def test_repetition_counts_the_prompt_the_others_do_not():
    flat = torch.zeros(1, VOCABULARY)
    flat[0, :2] = torch.tensor([1.0, 0.9])
    assert int(Sampler([Row(Sampling(repetition_penalty=1.5), [0])])(flat)) == 1
    assert int(Sampler([Row(Sampling(presence_penalty=1.5), [0])])(flat)) == 0


def test_memory_of_tokens_is_kept_only_for_penalties():
    plain, penalized = Row(Sampling(), [1]), Row(Sampling(repetition_penalty=1.1), [1])
    sampler = Sampler([plain, penalized])
    sampler(scores(2))
    assert plain._seen is None
    assert sampler._penalties is not None
    assert sampler._penalties.counts.shape == (1, VOCABULARY)


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match=r"shape \[2, 50\] do not fit 1 sequences"):
        Sampler([Row(Sampling())])(scores(2))
    with pytest.raises(InputError, match="prompt has token 50, but there are scores for 50"):
        Sampler([Row(Sampling(repetition_penalty=2), [50])])(scores(1))
