"""Sampling against transformers' warpers, the statistics of its draws, ties and extremes; penalties against transformers."""

import math
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from auraflux.errors import InputError
from auraflux.ops._dispatch import use_backend
from auraflux.ops.sample.reference import penalize, sample

BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])
DRAWS = 4096


def draw(
    logits: Tensor, uniform: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Sample every row with the same settings."""
    n = logits.shape[0]
    return sample(
        logits,
        uniform,
        torch.full((n,), temperature),
        torch.full((n,), top_k, dtype=torch.int32),
        torch.full((n,), top_p),
        torch.full((n,), min_p),
    )


def warped(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Return the probabilities that transformers samples from."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    no_ids = torch.LongTensor(1, 0)
    return warpers(no_ids, cast(torch.FloatTensor, logits[None].double()))[0].softmax(-1)


SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.6, 20, 0.95, 0.0),
    (1.5, 30, 0.9, 0.05),
    (2.0, 3, 0.5, 0.3),
    (0.3, 100, 0.99, 0.01),
]


@BACKENDS
@pytest.mark.parametrize("chosen", SETTINGS)
def test_evenly_spread_numbers_give_the_distribution_of_transformers(backend, chosen):
    logits = torch.randn(50) * 2
    uniform = (torch.arange(DRAWS) + 0.5) / DRAWS
    with use_backend(backend):
        ids = draw(logits.expand(DRAWS, -1).contiguous(), uniform, *chosen)
    share = torch.bincount(ids, minlength=50) / DRAWS
    expected = warped(logits, *chosen)
    assert (share[expected == 0] == 0).all()
    assert (share - expected).abs().max() <= 1.01 / DRAWS


@BACKENDS
def test_random_numbers_give_frequencies_that_pass_chi_square(backend):
    chosen, draws = (0.9, 12, 0.95, 0.02), 20_000
    logits = torch.randn(30, generator=torch.Generator().manual_seed(1))
    uniform = torch.rand(draws, generator=torch.Generator().manual_seed(2))
    with use_backend(backend):
        ids = draw(logits.expand(draws, -1).contiguous(), uniform, *chosen)
    expected = warped(logits, *chosen) * draws
    counts, selected = torch.bincount(ids, minlength=30), expected > 0
    assert counts[~selected].sum() == 0
    statistic = ((counts - expected)[selected] ** 2 / expected[selected]).sum().item()
    freedom = int(selected.sum()) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


@BACKENDS
def test_a_larger_number_never_draws_a_likelier_token(backend):
    logits = torch.randn(40)
    uniform = torch.linspace(0, 1 - 2**-24, 200)
    with use_backend(backend):
        ids = draw(logits.expand(200, -1).contiguous(), uniform, 1.3, 0, 0.97)
    assert ids[0] == logits.argmax()
    assert (logits[ids].diff() <= 0).all()


@BACKENDS
def test_greedy_ties_go_to_the_lower_index(backend):
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-0.0, 0.0, -1.0, -1.0], [-torch.inf] * 4, [torch.nan, 1.0, 2.0, 2.0]])
    with use_backend(backend):
        assert draw(logits, torch.rand(4), 0.0, 2, 0.1, 0.5).tolist() == [1, 0, 0, 2]


@BACKENDS
def test_greedy_finds_the_best_of_a_large_vocabulary(backend):
    logits = torch.randn(1, 100_003)
    for place in (0, 50_000, 100_002):
        logits[0, place] = 100.0 + place
        with use_backend(backend):
            assert draw(logits, torch.zeros(1), 0.0).item() == place


@BACKENDS
def test_ties_of_the_last_of_top_k_are_selected(backend):
    logits = torch.tensor([3.0, 1.0, 2.0, 1.0, 1.0, 0.0])
    uniform = (torch.arange(512) + 0.5) / 512
    with use_backend(backend):
        ids = draw(logits.expand(512, -1).contiguous(), uniform, 1.0, 3)
    assert set(ids.tolist()) == {0, 1, 2, 3, 4}


@BACKENDS
@pytest.mark.parametrize(
    "chosen",
    [
        (1e-4, 0, 1.0, 0.0),
        (1e-30, 50, 0.9, 0.1),
        (1.0, 1, 1.0, 0.0),
        (1.0, 0, 1e-9, 0.0),
        (1.0, 0, 0.0, 0.0),
        (1.0, 0, 1.0, 1.0),
    ],
)
def test_extreme_settings_select_the_best_alone(backend, chosen):
    logits = torch.randperm(333).float().expand(64, -1).contiguous()
    with use_backend(backend):
        assert (draw(logits, torch.rand(64), *chosen) == logits.argmax(-1)).all()


@BACKENDS
@pytest.mark.parametrize("chosen", SETTINGS)
def test_masked_tokens_are_never_drawn(backend, chosen):
    logits, allowed = torch.full((256, 100), -torch.inf), [7, 50, 99]
    logits[:, allowed] = torch.randn(256, 3)
    with use_backend(backend):
        ids = draw(logits, torch.linspace(0, 1 - 2**-24, 256), *chosen)
        assert set(ids.tolist()) <= set(allowed)
        logits[:, [7, 50]] = -torch.inf
        assert (draw(logits, torch.rand(256), *chosen) == 99).all()


@BACKENDS
def test_numbers_and_settings_out_of_range_still_draw_a_selected_token(backend):
    logits = torch.full((1, 10), -torch.inf)
    logits[0, [2, 5]] = torch.tensor([1.0, 0.0])
    with use_backend(backend):
        for number in (1.0, 7.0, -3.0, torch.nan):
            assert draw(logits, torch.tensor([number])).item() in (2, 5)
        for chosen in ((1.0, -5, 2.0, 0.0), (1.0, 0, 1.0, 3.0)):
            assert draw(logits, torch.tensor([0.3]), *chosen).item() == 2


@BACKENDS
@pytest.mark.parametrize(
    "chosen",
    [(-1.0, 0, 1.0, 0.0), (torch.nan, 0, 1.0, 0.0), (1.0, 0, torch.nan, 0.0), (1.0, 0, 1.0, -1.0), (1.0, 0, -0.5, 0.0)],
)
def test_settings_that_mean_nothing_are_refused(chosen, backend):
    with use_backend(backend), pytest.raises(InputError, match="for a row; it may not be negative"):
        draw(torch.ones(1, 10), torch.tensor([0.3]), *chosen)


@BACKENDS
def test_rows_of_a_batch_do_not_touch_each_other(backend):
    n = 40
    logits, uniform = torch.randn(n, 2000) * 3, torch.rand(n)
    temperature, top_k = torch.rand(n) * 2, torch.randint(0, 9, (n,), dtype=torch.int32)
    top_p, min_p = torch.rand(n), torch.rand(n) * 0.1
    with use_backend(backend):
        together = sample(logits, uniform, temperature, top_k, top_p, min_p)
        alone = [sample(*(t[i : i + 1] for t in (logits, uniform, temperature, top_k, top_p, min_p))) for i in range(n)]
    assert torch.equal(together, torch.cat(alone))


VALUES = st.sampled_from([-math.inf, math.inf, math.nan, -0.0, 0.0, 1.0, 1.25, 2.0, 2.0000002, -3.0, 40.0, -90.0])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(VALUES, min_size=1, max_size=12),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 1 - 2**-24]),
    st.sampled_from([0.0, 1e-3, 0.5, 1.0, 3.0, 1e6]),
    st.integers(0, 13),
    st.sampled_from([0.0, 0.3, 0.77, 1.0]),
    st.sampled_from([0.0, 0.2, 0.6, 1.0]),
)
def test_kernel_and_reference_draw_the_same(logits, uniform, temperature, top_k, top_p, min_p):
    arguments = torch.tensor([logits]), torch.tensor([uniform]), temperature, top_k, top_p, min_p
    with use_backend("reference"):
        expected = draw(*arguments)
    with use_backend("cpu"):
        assert torch.equal(draw(*arguments), expected)


@pytest.mark.parametrize("chosen", [*SETTINGS, (1.0, 3000, 1.0, 0.0), (1.0, 0, 0.9999, 0.0), (4.0, 0, 1.0, 1e-3)])
@pytest.mark.parametrize("scale", [0.05, 2.0, 9.0])
def test_kernel_and_reference_draw_the_same_of_many_tokens(scale, chosen):
    logits = (torch.randn(1, 4099) * scale).expand(64, -1).contiguous()
    # many scores are equal, as rounded ones are
    logits = (logits * 8).round() / 8
    uniform = torch.linspace(0, 1 - 2**-24, 64)
    with use_backend("reference"):
        expected = draw(logits, uniform, *chosen)
    with use_backend("cpu"):
        assert torch.equal(draw(logits, uniform, *chosen), expected)


@BACKENDS
def test_infinite_scores_share_all_probability(backend):
    logits = torch.randn(100, 777)
    logits[:, [5, 600]] = torch.inf
    logits[:, 7] = torch.nan
    uniform = (torch.arange(100) + 0.5) / 100
    with use_backend(backend):
        assert draw(logits, uniform).tolist() == [5] * 50 + [600] * 50
        drawn = draw(torch.full((100, 100), -torch.inf), uniform)
    assert drawn.tolist() == list(range(100))


@BACKENDS
def test_repetition_is_that_of_transformers(backend):
    logits, seen = torch.randn(1, 50) * 3, torch.tensor([[3, 7, 7, 20]])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(seen, logits.clone())
    prompt, counts = torch.zeros(1, 50, dtype=torch.bool), torch.zeros(1, 50, dtype=torch.int32)
    prompt[0, 3] = True
    counts[0, [7, 20]] = torch.tensor([2, 1], dtype=torch.int32)
    off = torch.zeros(1)
    with use_backend(backend):
        torch.testing.assert_close(penalize(logits, prompt, counts, torch.tensor([1.3]), off, off), expected)


@BACKENDS
def test_presence_and_frequency_look_at_the_output_only(backend):
    logits = torch.tensor([[1.0, 1.0, 1.0, -1.0], [1.0, 1.0, 1.0, 1.0]])
    prompt = torch.tensor([[True, False, True, False]]).expand(2, -1).contiguous()
    counts = torch.tensor([[0, 0, 1, 3], [2, 0, 0, 0]], dtype=torch.int32)
    repetition, presence, frequency = torch.tensor([2.0, 1.0]), torch.tensor([0.5, 0.0]), torch.tensor([0.25, 1.0])
    with use_backend(backend):
        found = penalize(logits, prompt, counts, repetition, presence, frequency)
    assert found.tolist() == [[0.5, 1.0, -0.25, -3.25], [-1.0, 1.0, 1.0, 1.0]]


@BACKENDS
def test_penalties_that_are_off_change_nothing(backend):
    logits = torch.randn(3, 77)
    logits[1, 5] = -torch.inf
    prompt, counts = torch.rand(3, 77) < 0.5, torch.randint(0, 4, (3, 77), dtype=torch.int32)
    with use_backend(backend):
        assert torch.equal(penalize(logits, prompt, counts, torch.ones(3), torch.zeros(3), torch.zeros(3)), logits)


def test_arguments_that_do_not_fit_are_refused():
    logits, ones = torch.randn(2, 5), torch.ones(2)
    top_k = torch.ones(2, dtype=torch.int32)
    with pytest.raises(InputError, match=r"'uniform' has shape \[3\]; \[2\] is needed"):
        sample(logits, torch.rand(3), ones, top_k, ones, ones)
    with pytest.raises(InputError, match="'top_k' has dtype int64; int32 is needed"):
        sample(logits, ones, ones, top_k.long(), ones, ones)
    with pytest.raises(InputError, match="'min_p' has dtype float64; float32 is needed"):
        sample(logits, ones, ones, top_k, ones, ones.double())
    with pytest.raises(InputError, match="'logits' has an empty vocabulary"):
        sample(torch.randn(2, 0), ones, ones, top_k, ones, ones)
    with pytest.raises(InputError, match=r"'logits' .* is not contiguous"):
        sample(torch.randn(5, 2).T, ones, ones, top_k, ones, ones)
    mask, counts = torch.zeros(2, 5, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.int32)
    with pytest.raises(InputError, match="'prompt_mask' has dtype int32; bool is needed"):
        penalize(logits, counts, counts, ones, ones, ones)
    with pytest.raises(InputError, match=r"'output_counts' has shape \[2, 4\]; \[2, 5\] is needed"):
        penalize(logits, mask, counts[:, :4].contiguous(), ones, ones, ones)
    with pytest.raises(InputError, match=r"'repetition' has shape \[1\]; \[2\] is needed"):
        penalize(logits, mask, counts, ones[:1], ones, ones)
