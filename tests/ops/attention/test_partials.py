"""Partial attention: merged ranges of keys equal the attention over all of them."""

from dataclasses import replace

import pytest
import torch

from auraflux.ops import attention, attention_partials, merge_partials, use_backend
from auraflux.ops.attention._inputs import RAGGED
from auraflux.ops.attention.cases import queries


@pytest.fixture(autouse=True, params=["reference", "cpu"])
def _backend(request):
    with use_backend(request.param):
        yield


@pytest.mark.parametrize(
    "options", [{}, {"sinks": True}, {"softcap": 3.0}, {"window": 9}, {"page": 7, "cache": torch.bfloat16}], ids=str
)
def test_one_merged_block_is_attention(options):
    args = queries(*RAGGED, (8, 2), 64, **options)
    found = merge_partials(*attention_partials(**args)).view(args["q"].shape)
    torch.testing.assert_close(found, attention(**args))


@pytest.mark.parametrize("lengths", [[30, 100], [700, 23]])
@pytest.mark.parametrize("newest", [1, 5, 16])
def test_recent_and_older_keys_merge_to_attention(lengths, newest):
    args = queries(lengths, [1, 1], (4, 2), 64, sinks=True)
    near = attention_partials(**(args | {"window": newest}))
    shorter = replace(args["pages"], lengths=args["pages"].lengths - newest)
    far = attention_partials(**(args | {"pages": shorter, "sinks": None}))
    o, m, l = (torch.cat(part, 1) for part in zip(near, far, strict=True))  # noqa: E741
    torch.testing.assert_close(merge_partials(o, m, l).view(args["q"].shape), attention(**args))


def test_maximum_and_sum_cover_the_visible_keys():
    args = queries([20], [1], (2, 1), 32, page=4, window=6)
    pages = args["pages"]
    k = torch.cat([pages.k[page, 0] for page in pages.table[0].tolist()])[14:20]
    scores = args["q"][0] @ k.T * args["scale"]
    _, m, l = attention_partials(**args)  # noqa: E741
    torch.testing.assert_close(m[:, 0], scores.amax(-1))
    torch.testing.assert_close(l[:, 0], torch.exp(scores - scores.amax(-1, keepdim=True)).sum(-1))


def test_nothing_visible():
    args = queries(*RAGGED, (4, 2), 64, window=0)
    o, m, l = attention_partials(**args)  # noqa: E741
    assert not o.any()
    assert not l.any()
    assert (m == -torch.inf).all()


def test_only_sinks_are_visible():
    args = queries([5, 3], [2, 1], (4, 2), 64, window=0, sinks=True)
    o, m, l = attention_partials(**args)  # noqa: E741
    assert not o.any()
    assert (l == 1).all()
    assert torch.equal(m.view(3, 4), args["sinks"].expand(3, 4))


def test_no_tokens():
    args = queries([5], [0], (4, 2), 64)
    assert [part.shape for part in attention_partials(**args)] == [(0, 1, 64), (0, 1), (0, 1)]
