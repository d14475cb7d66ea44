"""Experts are dealt out so that ranks run equally many rows, each has as many as before, and few change hands."""

import numpy as np
import pytest

from auraflux.errors import InputError
from auraflux.weights.placement import Placement, by_number, deal_all, deal_out


def loads(uses: list[int], owners: list[int], size: int) -> list[int]:
    return [sum(count for count, owner in zip(uses, owners, strict=True) if owner == rank) for rank in range(size)]


@pytest.mark.parametrize(("count", "size"), [(64, 2), (128, 3), (256, 8), (7, 2)])
def test_ranks_run_equally_many_rows(count: int, size: int):
    # the first experts are liked best, as by Zipf, so that the first rank has most to do
    uses = [100_000 // (expert + 4) for expert in range(count)]
    before = by_number(count, size)
    after = deal_out(uses, before, size)
    mean = sum(uses) / size
    assert max(loads(uses, before, size)) > 1.1 * mean
    # of a few, none can be halved
    assert max(loads(uses, after, size)) < (1.02 if count > 7 else 1.05) * mean
    assert [after.count(rank) for rank in range(size)] == [before.count(rank) for rank in range(size)]
    assert after == deal_out(uses, before, size)
    assert deal_out(uses, after, size) == after


def test_few_change_hands():
    uses = [100] * 64
    uses[3] = 160
    after = deal_out(uses, by_number(64, 2), 2)
    assert after == by_number(64, 2), "no exchange makes it more even"
    uses[4] = 160
    changed = [
        expert
        for expert, pair in enumerate(zip(by_number(64, 2), deal_out(uses, by_number(64, 2), 2), strict=True))
        if len(set(pair)) > 1
    ]
    assert len(changed) == 2


def test_one_that_everybody_chooses_has_those_beside_it_that_nobody_does():
    uses = [1000, 10, 10, 10, 0, 0, 0, 0]
    after = deal_out(uses, by_number(8, 2), 2)
    assert sorted(loads(uses, after, 2)) == [30, 1000]


def test_uses_by_chance_are_never_dealt_out_worse():
    made = np.random.default_rng(0)
    for _ in range(200):
        count, size = int(made.integers(2, 40)), int(made.integers(2, 5))
        uses = made.integers(0, made.choice([2, 10, 1000]), count).tolist()
        owners = made.permutation(by_number(count, size)).tolist()
        after = deal_out(uses, owners, size)
        assert sorted(after) == sorted(owners)
        assert max(loads(uses, after, size)) <= max(loads(uses, owners, size))


def test_what_a_deal_brings():
    owners, dealt = deal_all({"a": [9, 1, 0, 0], "b": [0, 0, 0, 0]}, {"b": [1, 0, 1, 0]}, 2)
    assert sorted(loads([9, 1, 0, 0], owners["a"], 2)) == [1, 9]
    assert owners["b"] == [1, 0, 1, 0]
    assert (dealt.rows, dealt.before, dealt.after, dealt.moved) == (10, 1.0, 0.9, 2)


def test_uses_of_other_experts_are_refused():
    with pytest.raises(InputError, match="the uses of 3 experts are known of a, which has 4"):
        Placement(0, 2, {"a": [0, 1, 0]}).share("a", 4)
