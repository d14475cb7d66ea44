"""The share of kept latents that kernels around attention over coded latents make on Hopper, in Triton's interpreter."""

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from auraflux.ops.hopper.softmax import Parts
from auraflux.ops.turboquant._inputs import attend_latent
from auraflux.ops.turboquant.codebook import codebook
from auraflux.ops.turboquant.cuda import mla_merge
from auraflux.ops.turboquant.cuda.hadamard import rotation_for
from auraflux.ops.turboquant.cuda.mla_kept import asking
from auraflux.ops.turboquant.pages import LatentCodes, unpack
from auraflux.ops.turboquant.reference import rotate, turboquant_latent_attention
from auraflux.ops.turboquant.rotation import hadamard

WIDTH, ROPE, SPLITS = 512, 8, 3
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled for the GPU here"),
]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch):
    """No kernel runs beside another."""
    torch.manual_seed(0)
    monkeypatch.setattr(mla_merge, "gdc_wait", lambda: None)
    monkeypatch.setattr(mla_merge, "gdc_launch_dependents", lambda: None)


def transformed(x: Tensor, low: int) -> Tensor:
    """The transform, without its factor, over three bits of a channel, of which the lowest is worth `low`."""
    apart = x.unflatten(-1, (-1, 8, low)).transpose(-1, -2)
    return (hadamard(apart.contiguous()) * 8**0.5).transpose(-1, -2).flatten(-3)


def shares_of_codes(q: Tensor, q_rope: Tensor, pages: LatentCodes, scale: float, counts: list[int], low: int, parts: Parts):
    """Leave in the first slots what kernels find in the codes: means, largest scores to base 2 and sums of weights."""
    assert pages.plain is not None
    token = 0
    for b, (length, new) in enumerate(zip(pages.lengths.tolist(), counts, strict=True)):
        page, slot = pages.rows_of(b, 0, length)
        levels = (
            codebook(pages.bits, WIDTH)[unpack(pages.codes[page, slot], pages.bits, WIDTH)] * pages.norms[page, slot][:, None]
        )
        for position in range(length - new, length):
            coded = torch.tensor(range(pages.plain.first, position - pages.plain.newest + 1), dtype=torch.int64)
            for n, mine in enumerate(coded.chunk(SPLITS) if len(coded) else []):
                scores = rotate.reference(q[token], pages.seed) @ levels[mine].T
                scores = (scores + q_rope[token] @ pages.rope[page, slot][mine].T) * (scale * 1.4426950408889634)
                top = scores.amax(-1)
                weights = torch.exp2(scores - top[:, None])
                at = slice(token * q.shape[1], (token + 1) * q.shape[1]), n
                parts.m[at], parts.l[at] = top, weights.sum(-1)
                parts.o[at] = transformed(weights @ levels[mine] / weights.sum(-1, keepdim=True), low)
            token += 1


@pytest.mark.parametrize(
    "plain", [(1, 32), *(pytest.param(kept, marks=pytest.mark.slow) for kept in [(3, 0), (0, 20), (2, 40)])]
)
@pytest.mark.parametrize("before", [True, False], ids=["queries", "merge"])
def test_the_share_of_kept_latents_is_merged_with_those_of_codes(before, plain):
    counts = [1, 2, 1]
    args = attend_latent([100, 30, 1], counts, 2, WIDTH, ROPE, page=64, plain=plain)
    q, q_rope, pages, starts, scale = args.values()
    low, slots = (32, SPLITS + 1) if before else (64, SPLITS)
    parts = Parts(torch.zeros(8, slots, WIDTH), torch.full((8, slots), -torch.inf), torch.zeros(8, slots))
    shares_of_codes(q, q_rope, pages, scale, counts, low, parts)
    signs, _ = rotation_for(WIDTH, pages.seed, False, q.device)
    question, out = asking(q, q_rope, pages, starts, scale, 16), torch.empty_like(q)
    with np.errstate(all="ignore"):
        if before:
            rotated = mla_merge.hadamard_queries(q, signs, parts, low, question)
            torch.testing.assert_close(rotated.float(), rotate.reference(q, pages.seed), rtol=2e-3, atol=2e-3)
            mla_merge.merge_rotated(parts, signs, out, low, early=False)
        else:
            mla_merge.merge_rotated(parts, signs, out, low, True, question)
    expected = turboquant_latent_attention.reference(q, q_rope, pages, starts, scale)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
