"""Balanced expert parallelism: uncached experts are assigned evenly, cached ones to a rank that has them."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from auraflux.errors import RankError
from auraflux.weights.experts.offloaded import OffloadPolicy
from auraflux.weights.parallel.balanced_experts import MIN_SHARDED_TOKENS, BalancedExperts, ExpertBalancer

COUNT = 24  # experts


class FakeExperts:
    """Offloaded experts with a fixed set of cached ones."""

    def __init__(self, cached: list[int]):
        self._cached, self.file, self.policy = cached, self, OffloadPolicy()
        self.count = COUNT

    def cached_experts(self) -> list[int]:
        return self._cached


class FakeGroup:
    """Group whose other ranks have already sent their bytes."""

    number = 1

    def __init__(self, others: dict[int, Tensor]):
        self.others = others
        self.sent = torch.empty(0)

    def all_to_all(self, mine: list[Tensor], nbytes: list[int], most: int) -> list[Tensor]:
        self.sent = mine[0]
        assert max(nbytes) <= most
        return [self.others.get(rank, mine[0])[: nbytes[rank]] for rank in range(len(nbytes))]


def one_layer(rank: int, size: int, cached: list[int], group: FakeGroup) -> ExpertBalancer:
    balancer = ExpertBalancer(rank, size, lambda: group)
    experts: Any = FakeExperts(cached)
    BalancedExperts(experts, balancer)
    return balancer


def exchanged(cached: list[list[int]], rank: int = 0, digest: int = 7) -> tuple[ExpertBalancer, FakeGroup]:
    """Return the balancer of a rank after an exchange of cache contents without rows."""
    size, none = len(cached), torch.empty(0, 4)
    sent = {}
    for other in range(size):
        group = FakeGroup({})
        other_digest = digest if other != rank else 7
        one_layer(other, size, cached[other], group).exchange(0, other_digest, [0] * size, 0, [none] * size)
        sent[other] = group.sent
    group = FakeGroup({other: data for other, data in sent.items() if other != rank})
    balancer = one_layer(rank, size, cached[rank], group)
    balancer.assign(0, [])
    balancer.exchange(0, 7, [0] * size, 0, [none] * size)
    return balancer, group


experts = st.lists(st.integers(0, COUNT - 1), max_size=COUNT, unique=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(experts, min_size=2, max_size=4), st.lists(experts, min_size=1, max_size=5))
def test_all_ranks_compute_the_same_even_assignment(cached: list[list[int]], steps: list[list[int]]):
    ranks = [exchanged(cached, rank)[0] for rank in range(len(cached))]
    for requested in steps:
        found = [balancer.assign(0, requested) for balancer in ranks]
        assert all(each == found[0] for each in found)
        owners, reads = found[0]
        assert set(owners) == set(requested)
        assert max(reads) - min(reads) <= 1
        for expert, owner in owners.items():
            holders = [rank for rank, each in enumerate(cached) if expert in each]
            assert owner in (holders or range(len(cached)))
        # idle disks prefetch different experts, which no rank has cached
        shares = [balancer.prefetch_share(0, reads, requested[::-1]) for balancer in ranks]
        flat = [expert for each in shares for expert in each]
        assert len(set(flat)) == len(flat)
        assert not set(flat) & {expert for each in cached for expert in each}
        assert all(len(each) <= max(reads) - count for each, count in zip(shares, reads, strict=True))


def test_an_odd_read_goes_to_the_rank_with_the_fewest_reads():
    balancer, _ = exchanged([[], []])
    assert [balancer.assign(0, [expert])[1] for expert in range(4)] == [[1, 0], [0, 1], [1, 0], [0, 1]]


def test_a_new_group_resets_the_exchanged_cache_contents():
    balancer, group = exchanged([[], [3]])
    assert balancer.assign(0, [3])[0] == {3: 1}
    group.number = 2
    assert balancer.assign(0, [3])[0] == {3: 0}


def test_ranks_that_chose_different_experts_are_refused():
    with pytest.raises(RankError, match="Give --expert-balance off"):
        exchanged([[], []], digest=8)


def test_rows_are_exchanged_unchanged():
    rows = torch.arange(12.0).view(3, 4)
    other = FakeGroup({})
    one_layer(1, 2, [1], other).exchange(0, 7, [0, 3], 3, [rows, rows])
    here = one_layer(0, 2, [], FakeGroup({1: other.sent}))
    assert torch.equal(here.exchange(0, 7, [0, 3], 3, [torch.empty(0, 4)] * 2)[1], rows)


@pytest.mark.parametrize("tokens", [MIN_SHARDED_TOKENS, MIN_SHARDED_TOKENS + 7])
def test_each_rank_sums_a_shard_of_many_tokens(tokens: int):
    sums = torch.arange(tokens * 4.0).view(tokens, 4)
    ranges = ExpertBalancer(0, 3, lambda: FakeGroup({})).token_ranges(tokens)
    assert [token for each in ranges for token in each] == list(range(tokens))
    data = {rank: sums[each.start : each.stop].view(torch.uint8).flatten() for rank, each in enumerate(ranges) if rank}
    here = ExpertBalancer(0, 3, lambda: FakeGroup(data))
    assert torch.equal(here.all_gather(sums[: ranges[0].stop], ranges), sums)
    assert here.token_ranges(5) == [range(5)] * 3
