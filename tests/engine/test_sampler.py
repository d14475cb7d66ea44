"""Sampling: refused settings, greedy, seeds, penalties, and independence from the rest of the batch."""

import math

import pytest
import torch

from auraflux.engine.sampler import Sampler, SamplerState
from auraflux.engine.sampling import Sampling
from auraflux.errors import InputError
from auraflux.ops.sample.reference import sample

VOCABULARY = 50


def random_logits(states: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(states, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def tokens_of(sampling: Sampling, steps: int = 12, prompt=()) -> list[int]:
    """Return the tokens that a sequence gets alone; step i has the logits of seed i."""
    state = SamplerState(sampling, prompt)
    sampler = Sampler([state])
    for step in range(steps):
        state.append(int(sampler(random_logits(1, step))))
    return state.tokens


def test_a_discarded_token_is_sampled_again():
    state = SamplerState(Sampling(temperature=1.5, frequency_penalty=0.5, seed=7))
    chosen = [int(Sampler([state])(random_logits(1))), (state.reset_counts(), int(Sampler([state])(random_logits(1))))[1]]
    assert chosen[0] == chosen[1]
    state.append(chosen[0])
    assert state.uniform() != state._drawn[0]


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
def test_invalid_settings_are_refused(name, value):
    with pytest.raises(InputError, match=f"^{name}="):
        Sampling(**{name: value})


def test_a_single_stop_string_is_accepted():
    assert Sampling(stop="end").stop == ("end",)
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")
    assert Sampling(stop=None).stop == ()


def test_greedy_takes_the_likeliest():
    logits = random_logits(3)
    assert Sampler([SamplerState(Sampling())] * 3)(logits).equal(logits.argmax(-1))
    assert Sampler([SamplerState(Sampling(temperature=1.0, top_k=1, seed=1))] * 3)(logits).equal(logits.argmax(-1))
    logits[1, 5] = logits[1, 9] = 100.0
    assert Sampler([SamplerState(Sampling())] * 3)(logits)[1] == 5


def test_greedy_makes_no_copy_of_the_logits(monkeypatch):
    def fail(*args):
        raise AssertionError("called")

    def first(given, *settings):
        assert given is logits
        return sample(given, *settings)

    logits = random_logits(1)
    monkeypatch.setattr("auraflux.engine.sampler.sample", first)
    monkeypatch.setattr("auraflux.engine.sampler.penalize", fail)
    assert Sampler([SamplerState(Sampling(), [1, 2])])(logits).dtype == torch.int64


def test_the_same_seed_gives_the_same_tokens():
    hot = Sampling(temperature=1.5, seed=7)
    assert tokens_of(hot) == tokens_of(hot)
    assert tokens_of(hot) != tokens_of(Sampling(temperature=1.5, seed=8))
    assert tokens_of(Sampling(temperature=1.5), 30) != tokens_of(Sampling(temperature=1.5), 30)


MIXED = [
    Sampling(),
    Sampling(temperature=1.2, seed=3),
    Sampling(temperature=0.8, top_k=5, top_p=0.9, min_p=0.02, seed=4, repetition_penalty=1.3),
    Sampling(presence_penalty=0.7, frequency_penalty=0.4),
]
PROMPTS = [(1, 2), (3,), (4, 4, 5), (6,)]


def test_sampling_is_independent_of_the_batch():
    """Sequences join and leave, and each gets the tokens that it gets alone."""
    alone = [tokens_of(sampling, 12, prompt) for sampling, prompt in zip(MIXED, PROMPTS, strict=True)]
    states = [SamplerState(sampling, prompt) for sampling, prompt in zip(MIXED, PROMPTS, strict=True)]
    outputs: list[list[int]] = [[], [], [], []]
    for members in ([0, 1, 2, 3], [3, 1], [2], [0, 2, 1], [2, 3, 0]):
        sampler = Sampler([states[member] for member in members])
        for _ in range(2):
            logits = torch.cat([random_logits(1, len(outputs[member])) for member in members])
            for member, token in zip(members, sampler(logits).tolist(), strict=True):
                outputs[member].append(token)
                states[member].append(token)
    assert [output == expected[: len(output)] for output, expected in zip(outputs, alone, strict=True)] == [True] * 4
    assert min(map(len, outputs)) >= 6


def test_the_given_logits_are_not_changed():
    logits = random_logits(2)
    before = logits.clone()
    Sampler([SamplerState(Sampling(repetition_penalty=2.0), [0, 1]), SamplerState(Sampling())])(logits)
    assert logits.equal(before)


def test_penalties_count_generated_tokens():
    flat = torch.zeros(1, VOCABULARY)
    flat[0, :3] = torch.tensor([1.0, 0.9, 0.8])
    presence = Sampler([SamplerState(Sampling(presence_penalty=0.15))])
    assert [int(presence(flat)) for _ in range(5)] == [0, 1, 0, 0, 0]
    frequency = Sampler([SamplerState(Sampling(frequency_penalty=0.15))])
    assert [int(frequency(flat)) for _ in range(6)] == [0, 1, 0, 2, 1, 0]


def test_only_the_repetition_penalty_counts_the_prompt():
    flat = torch.zeros(1, VOCABULARY)
    flat[0, :2] = torch.tensor([1.0, 0.9])
    assert int(Sampler([SamplerState(Sampling(repetition_penalty=1.5), [0])])(flat)) == 1
    assert int(Sampler([SamplerState(Sampling(presence_penalty=1.5), [0])])(flat)) == 0


def test_token_counts_exist_only_for_penalties():
    plain, penalized = SamplerState(Sampling(), [1]), SamplerState(Sampling(repetition_penalty=1.1), [1])
    sampler = Sampler([plain, penalized])
    sampler(random_logits(2))
    assert plain._seen is None
    assert sampler._penalties is not None
    assert sampler._penalties.counts.shape == (1, VOCABULARY)


def test_logits_of_another_shape_are_refused():
    with pytest.raises(InputError, match=r"shape \[2, 50\] do not fit 1 sequences"):
        Sampler([SamplerState(Sampling())])(random_logits(2))
    with pytest.raises(InputError, match="prompt has token 50, but the model has logits for 50"):
        Sampler([SamplerState(Sampling(repetition_penalty=2), [50])])(random_logits(1))
