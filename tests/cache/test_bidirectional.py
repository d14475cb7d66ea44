"""Bidirectional attention: torch's function in blocks against explicit scores in float64."""

import pytest
import torch
from torch import Tensor

from auraflux.cache import BidirectionalShape, Cache, CacheSettings
from auraflux.cache.layers.bidirectional import BLOCK, attend_both_ways
from auraflux.errors import InputError


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Return the attention output by explicit scores, [T, Hq, Dv]."""
    q, k, v = (x.double() for x in (q, k, v))
    shared, at = q.shape[1] // k.shape[1], torch.arange(len(q))
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(shared, 1)) * scale
    if window is not None:
        scores[:, (at[:, None] - at).abs() >= window] = -torch.inf
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(shared, 1))


@pytest.mark.parametrize("window", [None, 1, 2, 12, 100, BLOCK + 1, 2000])
@pytest.mark.parametrize("tokens", [1, 7, 100, 2 * BLOCK + 3])
def test_attention_matches_explicit_scores(tokens: int, window: int | None):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tokens, heads, width, generator=generator) for heads, width in ((6, 24), (2, 24), (2, 16)))
    found = attend_both_ways(q, k, v, 0.3, window)
    torch.testing.assert_close(found.double(), attend(q, k, v, 0.3, window), atol=1e-5, rtol=1e-4)


def test_sequences_of_a_batch_do_not_see_each_other():
    cache = Cache([BidirectionalShape(3), BidirectionalShape()], CacheSettings("k4v4"), context=64, sequences=2)
    assert cache.bidirectional
    assert (cache.reserved_nbytes, cache.token_nbytes, cache.local_token_nbytes) == (0, 0, 0)
    first, second = cache.open(), cache.open()
    batch = cache.batch([first, second])
    batch.extend([5, 2])
    q, k, v = (torch.randn(7, heads, 8) for heads in (4, 2, 2))
    for layer, window in zip(cache.layers, (3, None), strict=True):
        layer.append(batch, k, v)
        found = layer.attend(batch, q, 0.5)
        wanted = torch.cat([attend(q[rows], k[rows], v[rows], 0.5, window) for rows in (slice(0, 5), slice(5, 7))])
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-4)
    # earlier tokens would have had to see these
    batch.extend([1, 1])
    with pytest.raises(InputError, match="all tokens of a sequence in one step"):
        cache.layers[0].append(batch, k[:2], v[:2])
