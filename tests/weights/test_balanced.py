"""Experts that no rank holds are dealt out evenly, by what all ranks have told; others go to who holds them."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from auraflux.errors import RankError
from auraflux.weights.balanced import MANY, Balance, Balanced
from auraflux.weights.streamed import Overlap

COUNT = 24  # experts


class Kept:
    """Experts of which some are in memory."""

    def __init__(self, held: list[int]):
        self._held, self.file, self.overlap = held, self, Overlap()
        self.count = COUNT

    def held(self) -> list[int]:
        return self._held


class Recorded:
    """A group whose other ranks have given their octets already."""

    number = 1

    def __init__(self, others: dict[int, Tensor]):
        self.others = others
        self.given = torch.empty(0)

    def swap(self, mine: list[Tensor], nbytes: list[int], most: int) -> list[Tensor]:
        self.given = mine[0]
        assert max(nbytes) <= most
        return [self.others.get(rank, mine[0])[: nbytes[rank]] for rank in range(len(nbytes))]


def made(rank: int, size: int, held: list[int], group: Recorded) -> Balance:
    balance = Balance(rank, size, lambda: group)
    kept: Any = Kept(held)
    Balanced(kept, balance)
    return balance


def told(held: list[list[int]], rank: int = 0, digest: int = 7) -> tuple[Balance, Recorded]:
    """A rank to which all have told what they hold, with no rows."""
    size, none = len(held), torch.empty(0, 4)
    given = {}
    for other in range(size):
        group = Recorded({})
        made(other, size, held[other], group).swap(0, digest if other != rank else 7, [0] * size, 0, [none] * size)
        given[other] = group.given
    group = Recorded({other: octets for other, octets in given.items() if other != rank})
    balance = made(rank, size, held[rank], group)
    balance.deal(0, [])
    balance.swap(0, 7, [0] * size, 0, [none] * size)
    return balance, group


experts = st.lists(st.integers(0, COUNT - 1), max_size=COUNT, unique=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(experts, min_size=2, max_size=4), st.lists(experts, min_size=1, max_size=5))
def test_all_deal_alike_and_evenly(held: list[list[int]], steps: list[list[int]]):
    ranks = [told(held, rank)[0] for rank in range(len(held))]
    for asked in steps:
        found = [balance.deal(0, asked) for balance in ranks]
        assert all(each == found[0] for each in found)
        owners, reading = found[0]
        assert set(owners) == set(asked)
        assert max(reading) - min(reading) <= 1
        for expert, owner in owners.items():
            holders = [rank for rank, each in enumerate(held) if expert in each]
            assert owner in (holders or range(len(held)))
        # disks with time left read different experts, which nobody has
        spared = [balance.spare(0, reading, asked[::-1]) for balance in ranks]
        flat = [expert for each in spared for expert in each]
        assert len(set(flat)) == len(flat)
        assert not set(flat) & {expert for each in held for expert in each}
        assert all(len(each) <= max(reading) - reads for each, reads in zip(spared, reading, strict=True))


def test_the_odd_one_goes_to_who_has_read_least():
    balance, _ = told([[], []])
    assert [balance.deal(0, [expert])[1] for expert in range(4)] == [[1, 0], [0, 1], [1, 0], [0, 1]]


def test_a_group_that_comes_back_begins_anew():
    balance, group = told([[], [3]])
    assert balance.deal(0, [3])[0] == {3: 1}
    group.number = 2
    assert balance.deal(0, [3])[0] == {3: 0}


def test_ranks_that_chose_differently_are_told():
    with pytest.raises(RankError, match="Give --expert-balance off"):
        told([[], []], digest=8)


def test_rows_come_whole():
    rows = torch.arange(12.0).view(3, 4)
    other = Recorded({})
    made(1, 2, [1], other).swap(0, 7, [0, 3], 3, [rows, rows])
    here = made(0, 2, [], Recorded({1: other.given}))
    assert torch.equal(here.swap(0, 7, [0, 3], 3, [torch.empty(0, 4)] * 2)[1], rows)


@pytest.mark.parametrize("tokens", [MANY, MANY + 7])
def test_each_adds_up_a_share_of_many_tokens(tokens: int):
    sums = torch.arange(tokens * 4.0).view(tokens, 4)
    spans = Balance(0, 3, lambda: Recorded({})).spans(tokens)
    assert [token for span in spans for token in span] == list(range(tokens))
    octets = {rank: sums[span.start : span.stop].view(torch.uint8).flatten() for rank, span in enumerate(spans) if rank}
    here = Balance(0, 3, lambda: Recorded(octets))
    assert torch.equal(here.join(sums[: spans[0].stop], spans), sums)
    assert here.spans(5) == [range(5)] * 3
