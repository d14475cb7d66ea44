"""Attention on quantized latents is latent attention on dequantized ones, and stored latents are those of `encode`."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops import use_backend
from auraflux.ops._cases import relative_rms
from auraflux.ops.attention.pages import LatentPages
from auraflux.ops.attention.reference import latent_attention
from auraflux.ops.turboquant.cases.inputs import edges
from auraflux.ops.turboquant.cases.latent_inputs import append_latent, attend_latent, latent_codes
from auraflux.ops.turboquant.codebook import BITS
from auraflux.ops.turboquant.pages import LatentCodes
from auraflux.ops.turboquant.reference import append_latent_codes, decode, encode, turboquant_latent_attention

BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def decoded(pages: LatentCodes) -> LatentPages:
    latent = decode.reference(pages.codes, pages.norms, pages.bits, pages.width, pages.seed)
    return LatentPages(latent, pages.rope.float(), pages.table, pages.lengths)


def plain(q_latent: Tensor, q_rope: Tensor, pages: LatentCodes, starts: Tensor, scale: float) -> Tensor:
    return latent_attention.reference(q_latent, q_rope, decoded(pages), starts, scale)


def stored(latent: Tensor, k_rope: Tensor, bits: int, page: int = 16) -> LatentCodes:
    """Return pages of one sequence with these tokens."""
    pages = latent_codes([len(latent)], latent.shape[1], k_rope.shape[1], bits, page)
    append_latent_codes(latent, k_rope, pages, edges([len(latent)]))
    return pages


@BACKENDS
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [64, 100, 512])
def test_attention_on_codes_is_attention_on_decoded_latents(bits, width, backend):
    args = attend_latent([20, 1, 0, 37, 48], [3, 1, 0, 1, 48], 4, width, 8, bits=bits)
    with use_backend(backend):
        assert relative_rms(turboquant_latent_attention(**args), plain(**args)) < 1e-5


@BACKENDS
@pytest.mark.parametrize("length", [1, 6, 7, 8, 95, 96, 97, 192, 193])
def test_lengths_around_the_ends_of_pages_and_blocks(length, backend):
    args = attend_latent([length], [min(length, 2)], 3, 64, 5, page=7)
    with use_backend(backend):
        assert relative_rms(turboquant_latent_attention(**args), plain(**args)) < 1e-5


@BACKENDS
def test_later_tokens_are_not_seen(backend):
    args = attend_latent([30], [10], 4, 64, 8)
    pages = args["pages"]
    with use_backend(backend):
        out = turboquant_latent_attention(**args)
        page, slot = pages.rows_of(0, 25, 30)
        pages.norms[page, slot] = torch.nan
        again = turboquant_latent_attention(**args)
    torch.testing.assert_close(again[:5], out[:5], rtol=1e-5, atol=1e-6)
    assert again[5:].isnan().all()


@BACKENDS
@pytest.mark.parametrize("width", [100, 128])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_vectors_of_any_length(scale, width, backend):
    latent, k_rope = torch.randn(21, width) * scale, torch.randn(21, 8)
    with use_backend(backend):
        pages = stored(latent, k_rope, 8)
        # the latent's part of the score would dominate the key's, or be all of it
        q = torch.randn(1, 4, width) * (0 if scale > 1 else 1)
        out = turboquant_latent_attention(q, torch.randn(1, 4, 8), pages, edges([1]), 0.3)
    assert out.isfinite().all()
    assert out.abs().max() <= 5 * scale


@BACKENDS
@pytest.mark.parametrize("bits", BITS)
def test_rows_are_those_of_encode(bits, backend):
    args = append_latent([21, 0, 40, 16], [5, 0, 1, 0], 128, 8, bits=bits)
    pages, latent = args["pages"], args["latent"]
    before = pages.codes.clone()
    with use_backend(backend):
        append_latent_codes(**args)
        codes, norms = encode(latent, bits, pages.seed)
    page, slot = (torch.cat(found) for found in zip(pages.rows_of(0, 16, 21), pages.rows_of(2, 39, 40), strict=True))
    assert torch.equal(pages.codes[page, slot], codes)
    assert torch.equal(pages.norms[page, slot], norms)
    assert torch.equal(pages.rope[page, slot], args["k_rope"])
    assert (pages.codes != before).any(-1).sum() == 6


@BACKENDS
def test_token_by_token_equals_all_at_once(backend):
    latent, k_rope = torch.randn(11, 100), torch.randn(11, 8)
    with use_backend(backend):
        whole = stored(latent, k_rope, 6, page=4)
        steps = replace(
            whole, **{name: torch.zeros_like(getattr(whole, name)) for name in ("codes", "norms", "rope", "lengths")}
        )
        for t in range(11):
            steps.lengths[0] = t + 1
            append_latent_codes(latent[t : t + 1], k_rope[t : t + 1], steps, edges([1]))
    page, slot = whole.rows_of(0, 0, 11)
    for name in ("codes", "norms", "rope"):
        assert torch.equal(getattr(whole, name)[page, slot], getattr(steps, name)[page, slot])


def bad(message: str, call, *args, **kwargs):
    with pytest.raises(InputError, match=message):
        call(*args, **kwargs)


def test_pages_that_do_not_fit_together():
    pages = latent_codes([20], 64, 8)
    bad("'bits' is 5", replace, pages, bits=5)
    bad(r"'codes' has shape .*; \[any, any, 16\]", replace, pages, bits=8)
    bad("'norms' has dtype float16; float32", replace, pages, norms=pages.norms.half())
    bad("'rope' has shape", replace, pages, rope=torch.zeros(1, 16, 8))
    bad("one coordinate is needed", replace, pages, rope=pages.rope[..., :0].contiguous())
    bad("'table' has dtype int64; int32", replace, pages, table=pages.table.long())
    bad("width 4 cannot be quantized", replace, pages, width=4)


def test_steps_that_do_not_fit_the_pages():
    args = attend_latent([20, 9], [2, 1], 4, 64, 8)
    run, pages = turboquant_latent_attention, args["pages"]
    bad(r"'q_latent' has shape \[3, 4, 32\]", run, **{**args, "q_latent": torch.randn(3, 4, 32)})
    bad(r"'q_rope' has shape \[3, 4, 7\]", run, **{**args, "q_rope": torch.randn(3, 4, 7)})
    bad(r"'starts' \[0, 2, 4\] do not increase", run, **{**args, "starts": edges([2, 2])})
    bad(
        "sequence 1 of length 999 needs 63 pages",
        run,
        **{**args, "pages": replace(pages, lengths=torch.tensor([20, 999]).int())},
    )
    pages.table[1, 0] = 99
    bad("page 0 of sequence 1 is 99", run, **args)
    before = [tensor.clone() for tensor in (pages.codes, pages.norms, pages.rope)]
    bad("page 0 of sequence 1 is 99", append_latent_codes, torch.randn(2, 64), torch.randn(2, 8), pages, edges([1, 1]))
    assert all(torch.equal(a, b) for a, b in zip(before, (pages.codes, pages.norms, pages.rope), strict=True))
