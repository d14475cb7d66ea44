"""Sink tokens and recent window of quantized latents, on CPU kernels."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._cases import relative_rms
from auraflux.ops._dispatch import exact
from auraflux.ops.simd.replay.record import record
from auraflux.ops.turboquant.full_precision import FullPrecisionLatents, RowPages
from auraflux.ops.turboquant.pages import LatentCodes, row_words
from auraflux.ops.turboquant.reference import append_latent_codes, rotate, turboquant_latent_attention

WIDTH, ROPE, PAGE, HEADS, SEED, SCALE = 64, 8, 16, 3, 7, 0.15
ONE = torch.tensor([0, 1], dtype=torch.int32)
CONTRACTS = pytest.mark.parametrize("on", [False, True], ids=["fast", "exact"])


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def made(tokens: int, bits: int, first: int = 1, recent_window: int = 32, dtype: torch.dtype = torch.float32) -> LatentCodes:
    """Return empty pages of one sequence in random order."""
    count = -(-tokens // PAGE) + 1
    lengths = torch.tensor([tokens], dtype=torch.int32)
    codes, norms = torch.zeros(count, PAGE, row_words(bits, WIDTH), dtype=torch.int32), torch.zeros(count, PAGE)
    head = RowPages(torch.zeros(1, first, WIDTH, dtype=dtype), torch.zeros(1, 1, dtype=torch.int32), lengths)
    recent = RowPages(torch.zeros(count, PAGE, WIDTH, dtype=dtype), torch.randperm(count).int()[None], lengths)
    index = torch.zeros(count, PAGE, ROPE), torch.randperm(count).int()[None], lengths
    return LatentCodes(codes, norms, *index, bits, WIDTH, SEED, FullPrecisionLatents(head, recent, recent_window))


def full_precision_pages(pages: LatentCodes) -> tuple[RowPages, RowPages]:
    assert pages.full_precision is not None
    assert pages.full_precision.head is not None
    assert pages.full_precision.recent is not None
    return pages.full_precision.head, pages.full_precision.recent


def appended(pages: LatentCodes, latent: Tensor, k_rope: Tensor, steps: list[int]) -> LatentCodes:
    first = 0
    for new in steps:
        pages.lengths.fill_(first + new)
        mine = slice(first, first + new)
        append_latent_codes(latent[mine], k_rope[mine], pages, torch.tensor([0, new], dtype=torch.int32))
        first += new
    return pages


def tokens(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, WIDTH), torch.randn(count, ROPE)


def queries(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, HEADS, WIDTH), torch.randn(count, HEADS, ROPE)


def attended(q: tuple[Tensor, Tensor], pages: LatentCodes, on: bool = True) -> Tensor:
    with exact(on):
        return turboquant_latent_attention(*q, pages, torch.tensor([0, len(q[0])], dtype=torch.int32), SCALE)


def attended_uncompressed(q: tuple[Tensor, Tensor], latent: Tensor, k_rope: Tensor) -> Tensor:
    """Compute causal attention of the last queries on unquantized latents."""
    scores = torch.einsum("nhc,tc->hnt", q[0], latent) + torch.einsum("nhr,tr->hnt", q[1], k_rope)
    later = torch.arange(len(latent)) > torch.arange(len(latent) - len(q[0]), len(latent))[:, None]
    return ((scores * SCALE).masked_fill(later, -torch.inf).softmax(-1) @ latent).transpose(0, 1)


@CONTRACTS
@pytest.mark.parametrize("new", [1, 3, 80])
def test_eight_bits_are_close_to_attention_on_the_latents_themselves(on, new):
    rows, q = tokens(300), queries(new)
    assert relative_rms(attended(q, appended(made(300, 8), *rows, [300]), on), attended_uncompressed(q, *rows)) < 1e-2


@CONTRACTS
@pytest.mark.parametrize("new", [1, 20])
def test_a_sequence_within_the_recent_window_has_no_error(on, new):
    rows, q = tokens(20), queries(new)
    assert relative_rms(attended(q, appended(made(20, 2), *rows, [20]), on), attended_uncompressed(q, *rows)) < 1e-5


@pytest.mark.parametrize("steps", [[1] * 70, [33, 1, 36], [64, 6]], ids=len)
def test_steps_change_nothing(steps):
    rows, q, first = tokens(70), queries(70), 0
    empty = made(70, 4, 2, 20)

    def stored() -> list[Tensor]:
        return [empty.codes, empty.norms, empty.rope, *(each.rows for each in full_precision_pages(empty))]

    appended(empty, *rows, [70])
    whole = [tensor.clone() for tensor in stored()]
    parts = appended(empty, *rows, steps)
    assert all(torch.equal(found, expected) for found, expected in zip(stored(), whole, strict=True))
    together = attended(q, parts)
    for new in steps:
        parts.lengths.fill_(first + new)
        mine = slice(first, first + new)
        assert relative_rms(attended((q[0][mine], q[1][mine]), parts), together[mine]) < 1e-5
        first += new


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_rotated_and_rounded_once(dtype):
    latent, k_rope = tokens(40)
    latent[0], latent[1], latent[2], latent[3, 0] = 0.0, 1e6, 1e-7, torch.nan
    head, recent = full_precision_pages(appended(made(40, 4, 1, 8, dtype), latent, k_rope, [40]))
    expected = rotate.reference(latent, SEED).to(dtype)
    torch.testing.assert_close(recent.rows[recent.rows_of(0, 0, 40)], expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(head.rows[0, 0], expected[0])


@pytest.mark.parametrize("new", [1, 3, 80])
def test_nothing_is_read_twice_or_from_the_wrong_place(new):
    """Every code that all queries read in full precision is NaN, and so is every full-precision row that none reads."""
    length, first, recent_window = 200, 2, 20
    rows, q = tokens(length), queries(new)
    pages = appended(made(length, 8, first, recent_window), *rows, [length])
    expected = attended(q, pages)
    for ends in ((0, first), (length - recent_window, length)):
        pages.norms[pages.rows_of(0, *ends)] = torch.nan
    recent, unused = full_precision_pages(pages)[1], torch.arange(length) <= length - new - recent_window
    unused[:first] = True
    page, slot = recent.rows_of(0, 0, length)
    recent.rows[page[unused], slot[unused]] = torch.nan
    assert torch.equal(attended(q, pages), expected)


@pytest.mark.parametrize("new", [3, 80])
def test_a_full_precision_latent_reaches_the_queries_that_see_it_and_no_others(new):
    rows = tokens(200)
    pages = appended(made(200, 8), *rows, [200])
    recent = full_precision_pages(pages)[1]
    recent.rows[recent.rows_of(0, 199, 200)] = torch.nan
    found = attended(queries(new), pages)
    assert found[-1].isnan().all()
    assert not found[:-1].isnan().any()


def test_a_recorded_step_reads_current_values_when_replayed():
    latent, k_rope = tokens(200)
    pages, q = appended(made(200, 8), latent, k_rope, [200]), queries(1)
    new, new_rope = latent[100:101].clone(), k_rope[100:101].clone()

    def step() -> Tensor:
        append_latent_codes(new, new_rope, pages, ONE)
        return turboquant_latent_attention(*q, pages, ONE, SCALE)

    pages.lengths.fill_(101)
    step()
    with record() as recording:
        out = step()
    assert recording.rejected is None
    for position in (101, 150, 199):
        new.copy_(latent[position]), new_rope.copy_(k_rope[position])
        pages.lengths.fill_(position + 1)
        recording.replay()
        replayed = out.clone()
        assert torch.equal(replayed, step())


def test_a_full_precision_page_outside_the_pool_is_refused():
    rows, q = tokens(100), queries(1)
    pages = appended(made(100, 4), *rows, [100])
    head, recent = full_precision_pages(pages)
    # outside the window: not read
    recent.table[0, 3] = 99
    attended(q, pages)
    recent.table[0, 4] = 99
    with pytest.raises(InputError, match="page 4 of sequence 0 is 99"):
        attended(q, pages)
    recent.table[0, 6] = -1
    with pytest.raises(InputError, match="page 6 of sequence 0 is -1"):
        append_latent_codes(rows[0][:1], rows[1][:1], pages, ONE)
    recent.table[0, 4:7] = 0
    head.table[0, 0] = 1
    with pytest.raises(InputError, match="page 0 of the first positions of sequence 0 is 1 in the table; the pool has 1"):
        attended(q, pages)


def test_pages_that_do_not_fit_are_refused():
    pages = made(40, 4)
    head, recent = full_precision_pages(pages)
    narrow = RowPages(head.rows[..., :32].contiguous(), head.table, head.lengths)
    with pytest.raises(InputError, match="'head' holds 32 channels; 64 are needed"):
        replace(pages, full_precision=FullPrecisionLatents(narrow, recent, 32))
    twice = RowPages(recent.rows, recent.table.expand(2, -1).contiguous(), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(InputError, match="'recent' has tables of 2 sequences; the codes have 1"):
        replace(pages, full_precision=FullPrecisionLatents(head, twice, 32))
    with pytest.raises(InputError, match="'recent_window' is 0; a positive number is needed"):
        FullPrecisionLatents(head, recent, 0)
