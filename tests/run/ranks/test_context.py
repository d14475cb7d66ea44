"""Pages dealt out to ranks give what all of them give in one process, but for the order in which they are joined."""

from typing import Any

import pytest
import torch

from auraflux.run.load import load
from tests.models.oracles import error
from tests.run.ranks.test_pipeline import OPTIONS, saved
from tests.run.ranks.together import decoded, together

ROUNDING = 1e-6  # of sums in another order
LONG = 200  # tokens: more than three pages


def check(path: Any, ids: list[int], size: int, bound: float, **options: Any) -> None:
    ids = (ids * LONG)[:LONG]
    # texts begin on the first rank, so that there must be room for the first pages of all
    options = {**OPTIONS, "context": 512, **options}
    alone = load(path, **options)
    with together(path, "context", size, **options) as ranks:
        assert error(ranks.logits(ids), alone.logits(ids)) < bound
        for prompts in ([ids[:70]], [ids[:134], ids[5:12], ids[3:190], ids[7:8]]):
            assert error(decoded(ranks, prompts, 4), decoded(alone, prompts, 4)) < bound
        first, again = (ranks.logits(ids[:100]) for _ in range(2))
        assert torch.equal(first, again)


@pytest.mark.parametrize("kv", ["none", "k4v4"])
def test_pages_of_two_ranks(kv: str):
    check(*saved("llama"), 2, ROUNDING, kv=kv, exact=True)
