"""Shares of right predictions of an early router."""

import pytest
import torch

from bench.lab.early_router import rates


def test_right_predictions_count_by_rank():
    used = torch.tensor([[3, 5], [1, 2]])
    predicted = torch.tensor([[5, 3], [2, 0]])
    by_rank, first = rates(predicted, used, cached=0.0)
    assert by_rank == pytest.approx([1.0, 0.5])
    assert first == 1.0
