"""Explicit codebooks: their meaning, and refusals."""

from dataclasses import replace

import pytest
import torch

from auraflux.errors import InputError
from auraflux.ops import use_backend
from auraflux.ops._cases import relative_rms
from auraflux.ops._dispatch import exact
from auraflux.ops.turboquant.cases.inputs import (
    append,
    attend,
    edges,
    encoded,
    random_book,
    with_codebooks,
    with_zero,
)
from auraflux.ops.turboquant.cases.latent_inputs import latent_codes
from auraflux.ops.turboquant.codebook import BITS, Codebook, codebook
from auraflux.ops.turboquant.cpu.routes import ATTEND, Attend
from auraflux.ops.turboquant.pages import Codebooks, unpack
from auraflux.ops.turboquant.reference import (
    append_codes,
    append_latent_codes,
    decode,
    encode,
    rotate,
    turboquant_attention,
    turboquant_values,
)

BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@BACKENDS
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [100, 128])
def test_codes_are_of_the_nearest_level(backend, bits, width):
    book, x = random_book(bits, width), torch.randn(20, width)
    with use_backend(backend):
        codes, norms = encode(x, bits, 7, book)
        found = decode(codes, norms, bits, width, 7, book)
    unit = rotate.reference(x / x.norm(dim=-1, keepdim=True), 7)
    expected = (unit.double()[..., None] - book.levels.double()).abs().argmin(-1)
    assert (unpack(codes, bits, width) == expected).float().mean() > 0.9999
    torch.testing.assert_close(found.norm(dim=-1), x.norm(dim=-1))
    if bits > 4:
        assert relative_rms(found, x) < 0.1


@BACKENDS
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [100, 128])
def test_the_default_codebook_may_be_explicit(backend, bits, width):
    book, x = Codebook(codebook(bits, width).clone()), torch.randn(50, width)
    with use_backend(backend):
        for found, expected in zip(encode(x, bits, 7, book), encode(x, bits, 7), strict=True):
            assert torch.equal(found, expected)
        rows, weights = encode(x[None], bits, 7), torch.rand(2, 50)
        assert torch.equal(decode(*rows, bits, width, 7, book), decode(*rows, bits, width, 7))
        sums = turboquant_values(weights, *rows, bits, width), turboquant_values(weights, *rows, bits, width, levels=book)
        assert torch.equal(*sums)


@pytest.mark.parametrize("on", [False, True], ids=["fast", "exact"])
def test_pages_with_the_default_codebook_take_the_same_kernels(on):
    args = attend([333, 40], [1, 1], (8, 2), 128, (8, 4))
    pages = args["pages"]
    same = replace(pages, codebooks=Codebooks(Codebook(codebook(8, 128).clone()), None))
    with exact(on):
        assert torch.equal(turboquant_attention(**args), turboquant_attention(**{**args, "pages": same}))


def test_the_kernel_with_built_in_levels_declines_others():
    pages = with_codebooks(attend, [333], [1], (8, 2), 128, (8, 4))["pages"]
    with exact(False):
        verdict = ATTEND.explain(Attend(1, pages))
    assert verdict.taken == "float32"
    assert dict(verdict.refused)["attend_int8"] == "levels are given; it has the usual ones in its instructions"


@BACKENDS
def test_tokens_appended_are_attended_to(backend):
    args = with_codebooks(append, [70], [70], 2, 64, bits=(8, 8))
    q, one = torch.randn(1, 4, 64), edges([1])
    with use_backend(backend):
        append_codes(**args)
        found = turboquant_attention(q, args["pages"], one, 0.125)
    k, v = (x.repeat_interleave(2, 1).transpose(0, 1) for x in (args["k"], args["v"]))
    expected = ((q.transpose(0, 1) @ k.mT * 0.125).softmax(-1) @ v).transpose(0, 1)
    # random levels have a smaller range on both sides
    assert relative_rms(found, expected) < 0.1


@BACKENDS
@pytest.mark.parametrize("width", [64, 100])
def test_a_level_of_zero_and_vectors_of_zeros(backend, width):
    x = torch.randn(4, width)
    x[1] = 0.0
    with use_backend(backend):
        codes, norms = encode(x, 4, 7, with_zero(4, width))
        far = Codebook(torch.tensor([0.0, 100.0, 200.0, 300.0]))
        none = encode(x, 2, 7, far)[1]
    assert norms[1] == 0
    assert decode(codes, norms, 4, width, 7, with_zero(4, width)).isfinite().all()
    # all coordinates are nearest to the level 0
    assert torch.equal(none, torch.zeros(4))


@BACKENDS
def test_nan_has_the_last_code(backend):
    x = torch.randn(2, 64)
    x[0, 3] = torch.nan
    with use_backend(backend):
        codes, norms = encode(x, 4, 7, random_book(4, 64))
    assert (unpack(codes[0], 4, 64) == 15).all()
    assert norms[0].isnan()
    assert norms[1].isfinite()


def test_levels_that_make_no_sense_are_refused():
    for levels, message in (
        (torch.arange(5.0), "a codebook has 5 levels; 4, 8, 16, 64, 256 are supported"),
        (torch.tensor([0.0, 1.0, torch.inf, 3.0]), "must be finite"),
        (torch.tensor([0.0, torch.nan, 2.0, 3.0]), "must be finite"),
        (torch.tensor([0.0, 2.0, 2.0, 3.0]), "must ascend; level 2 is 2, the previous one 2"),
        (torch.tensor([0.0, 2.0, 1.0, 3.0]), "must ascend; level 2 is 1, the previous one 2"),
        (torch.arange(4.0).double(), "'levels' has dtype float64; float32"),
        (torch.zeros(2, 2), "'levels' has shape"),
    ):
        with pytest.raises(InputError, match=message):
            Codebook(levels)


def test_levels_for_other_bits_are_refused():
    book = random_book(3, 64)
    with pytest.raises(InputError, match="'levels' has 8 levels; codes of 4 bits need 16"):
        encode(**encoded(2, 64), levels=book)
    pages = attend([20], [1], (2, 2), 64)["pages"]
    with pytest.raises(InputError, match="'keys' has 8 levels; codes of 4 bits need 16"):
        replace(pages, codebooks=Codebooks(keys=book))
    with pytest.raises(InputError, match="'values' has 8 levels; codes of 4 bits need 16"):
        replace(pages, codebooks=Codebooks(values=book))
    with pytest.raises(InputError, match="'levels' has 8 levels; codes of 4 bits need 16"):
        replace(latent_codes([20], 64, 8), levels=book)


@BACKENDS
def test_latents_take_codebooks_too(backend):
    pages = replace(latent_codes([9], 64, 8, 4), levels=random_book(4, 64))
    latent = torch.randn(9, 64)
    with use_backend(backend):
        append_latent_codes(latent, torch.randn(9, 8), pages, edges([9]))
        codes, norms = encode(latent, 4, pages.seed, pages.levels)
    page, slot = pages.rows_of(0, 0, 9)
    assert torch.equal(pages.codes[page, slot], codes)
    assert torch.equal(pages.norms[page, slot], norms)
