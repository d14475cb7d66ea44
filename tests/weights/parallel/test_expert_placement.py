"""Rebalanced placement: ranks run equally many rows, each has as many experts as before, and few experts move."""

import numpy as np
import pytest

from auraflux.errors import InputError
from auraflux.weights.parallel.expert_placement import Placement, contiguous_placement, rebalance, rebalance_layer


def loads(uses: list[int], owners: list[int], size: int) -> list[int]:
    return [sum(count for count, owner in zip(uses, owners, strict=True) if owner == rank) for rank in range(size)]


@pytest.mark.parametrize(("count", "size"), [(64, 2), (128, 3), (256, 8), (7, 2)])
def test_ranks_run_equally_many_rows(count: int, size: int):
    # Zipf-distributed uses load the first rank most
    uses = [100_000 // (expert + 4) for expert in range(count)]
    before = contiguous_placement(count, size)
    after = rebalance_layer(uses, before, size)
    mean = sum(uses) / size
    assert max(loads(uses, before, size)) > 1.1 * mean
    # few experts cannot be balanced as well
    assert max(loads(uses, after, size)) < (1.02 if count > 7 else 1.05) * mean
    assert [after.count(rank) for rank in range(size)] == [before.count(rank) for rank in range(size)]
    assert after == rebalance_layer(uses, before, size)
    assert rebalance_layer(uses, after, size) == after


def test_few_experts_move():
    uses = [100] * 64
    uses[3] = 160
    after = rebalance_layer(uses, contiguous_placement(64, 2), 2)
    assert after == contiguous_placement(64, 2), "no swap makes it more even"
    uses[4] = 160
    changed = [
        expert
        for expert, pair in enumerate(
            zip(contiguous_placement(64, 2), rebalance_layer(uses, contiguous_placement(64, 2), 2), strict=True)
        )
        if len(set(pair)) > 1
    ]
    assert len(changed) == 2


def test_the_most_used_expert_shares_a_rank_with_unused_ones():
    uses = [1000, 10, 10, 10, 0, 0, 0, 0]
    after = rebalance_layer(uses, contiguous_placement(8, 2), 2)
    assert sorted(loads(uses, after, 2)) == [30, 1000]


def test_random_uses_are_never_balanced_worse():
    rng = np.random.default_rng(0)
    for _ in range(200):
        count, size = int(rng.integers(2, 40)), int(rng.integers(2, 5))
        uses = rng.integers(0, rng.choice([2, 10, 1000]), count).tolist()
        owners = rng.permutation(contiguous_placement(count, size)).tolist()
        after = rebalance_layer(uses, owners, size)
        assert sorted(after) == sorted(owners)
        assert max(loads(uses, after, size)) <= max(loads(uses, owners, size))


def test_the_effect_of_rebalancing_is_reported():
    owners, result = rebalance({"a": [9, 1, 0, 0], "b": [0, 0, 0, 0]}, {"b": [1, 0, 1, 0]}, 2)
    assert sorted(loads([9, 1, 0, 0], owners["a"], 2)) == [1, 9]
    assert owners["b"] == [1, 0, 1, 0]
    assert (result.rows, result.before, result.after, result.moved) == (10, 1.0, 0.9, 2)


def test_use_counts_of_another_model_are_refused():
    with pytest.raises(InputError, match="the use counts of a have 3 experts, but the layer has 4"):
        Placement(0, 2, {"a": [0, 1, 0]}).local_experts("a", 4)
