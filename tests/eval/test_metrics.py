"""Divergence, perplexity and percentiles on small examples."""

import math

import pytest
import torch

from auraflux.eval.metrics import NONE, Differences, compare, summary


def test_divergence_matches_the_definition():
    p, q = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]
    found = compare(torch.tensor([p]).log(), torch.tensor([q]).log(), torch.tensor([1]))
    assert found.kl == pytest.approx([0.5 * math.log(2) + 0.25 * math.log(0.5)])
    assert found.nll == pytest.approx([math.log(2)])
    assert found.same == [0]


def test_shifted_logits_do_not_differ():
    logits = torch.randn(7, 50)
    found = compare(logits, logits + 3, torch.arange(7))
    assert max(found.kl) < 1e-6
    assert found.same == [1] * 7


def test_logits_do_not_differ_from_themselves():
    logits = torch.randn(7, 50) * 10
    assert compare(logits, logits, torch.arange(7)).kl == [0.0] * 7


def test_percentiles_of_known_numbers():
    # 0, 1, ..., 1000 thousandths: the percentile p is p/100 itself
    found = summary(Differences([n / 1000 for n in range(1001)], [math.log(8)] * 1001, [1] * 250 + [0] * 751))
    assert found["kl_mean"] == pytest.approx(0.5)
    assert found["kl_median"] == pytest.approx(0.5)
    assert found["kl_p99"] == pytest.approx(0.99)
    assert found["kl_p99_9"] == pytest.approx(0.999)
    assert found["perplexity"] == pytest.approx(8)
    assert found["same_top"] == pytest.approx(250 / 1001)
    assert found["tokens"] == 1001


def test_an_empty_result_has_no_summary():
    assert summary(NONE) == {}
