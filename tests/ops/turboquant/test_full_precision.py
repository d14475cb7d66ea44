"""Key calibration, sink tokens and recent window of quantized KV pages, on CPU kernels."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._cases import relative_rms
from auraflux.ops._dispatch import exact
from auraflux.ops.attention.pages import KVPages
from auraflux.ops.attention.reference import merge_partials
from auraflux.ops.rope.frequencies import rope_frequencies
from auraflux.ops.rope.reference import rope
from auraflux.ops.simd.replay.record import record
from auraflux.ops.turboquant.calibration import BLOCK, Calibration, angle_table
from auraflux.ops.turboquant.full_precision import FullPrecisionKV
from auraflux.ops.turboquant.pages import CodePages
from auraflux.ops.turboquant.reference import append_codes, rotate, turboquant_attention, turboquant_partials

WIDTH, PAGE, HEADS, SEED = 64, 16, 2, 7
CONTRACTS = pytest.mark.parametrize("on", [False, True], ids=["fast", "exact"])


def made(
    tokens: int, bits: tuple[int, int], keys: Calibration | None = None, full_precision: tuple[int, int] | None = None
) -> CodePages:
    """Return empty pages of one sequence in random order."""
    count = -(-tokens // PAGE) + 1
    table, lengths = torch.randperm(count).int()[None], torch.tensor([tokens], dtype=torch.int32)
    pages = CodePages.empty(count, HEADS, PAGE, WIDTH, table, lengths, *bits, seed=SEED)
    if full_precision is None:
        return replace(pages, calibration=keys)
    head = KVPages(
        *(torch.zeros(1, HEADS, full_precision[0], WIDTH) for _ in "kv"), torch.zeros(1, 1, dtype=torch.int32), lengths
    )
    recent = KVPages(*(torch.zeros(count, HEADS, PAGE, WIDTH) for _ in "kv"), torch.randperm(count).int()[None], lengths)
    return replace(pages, calibration=keys, full_precision=FullPrecisionKV(head, recent, full_precision[1]))


def appended(pages: CodePages, k: Tensor, v: Tensor, steps: list[int]) -> CodePages:
    first = 0
    for new in steps:
        pages.lengths.fill_(first + new)
        append_codes(k[first : first + new], v[first : first + new], pages, torch.tensor([0, new], dtype=torch.int32))
        first += new
    return pages


def full_precision_pages(pages: CodePages) -> tuple[KVPages, KVPages]:
    assert pages.full_precision is not None
    assert pages.full_precision.head is not None
    assert pages.full_precision.recent is not None
    return pages.full_precision.head, pages.full_precision.recent


def stored(pages: CodePages) -> list[Tensor]:
    rows = [t for each in full_precision_pages(pages) for t in (each.k, each.v)]
    return [pages.key_codes, pages.key_norms, pages.value_codes, pages.value_norms, *rows]


def attended(q: Tensor, pages: CodePages, on: bool, **options: int) -> Tensor:
    with exact(on):
        return turboquant_attention(q, pages, torch.tensor([0, len(q)], dtype=torch.int32), WIDTH**-0.5, **options)


def real_looking(tokens: int) -> tuple[Tensor, Tensor, Calibration]:
    """Return keys with a rotating mean and large channels, values, and the calibration of the keys."""
    frequencies = rope_frequencies(WIDTH, 1e4)
    size = torch.exp(torch.randn(HEADS, WIDTH))
    size[:, WIDTH // 2 :] = size[:, : WIDTH // 2]
    mean = 3 * size * torch.randn(HEADS, WIDTH)
    k = rope(mean + size * torch.randn(tokens, HEADS, WIDTH), frequencies, torch.arange(tokens).int())
    first, second = mean[:, : WIDTH // 2], mean[:, WIDTH // 2 :]
    across = torch.cat((-second, first), -1)
    table = angle_table(frequencies, -(-(tokens + PAGE) // BLOCK) + 1, WIDTH)
    return k, torch.randn(tokens, HEADS, WIDTH), Calibration(size.sqrt(), 1 / size.sqrt(), mean, across, table)


def attended_uncompressed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention of the last queries on unquantized keys and values."""
    group = q.shape[1] // HEADS
    q, k, v = (x.double().transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    later = torch.arange(k.shape[1]) > torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
    scores = (q @ k.mT * WIDTH**-0.5).masked_fill(later, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).float()


@pytest.mark.parametrize("new", [1, 3, 80])
def test_eight_bits_are_close_to_attention_on_the_keys_themselves(new):
    torch.manual_seed(1)
    k, v, keys = real_looking(300)
    q = torch.randn(new, 4, WIDTH) * 0.3
    pages = appended(made(300, (8, 8), keys, (1, 32)), k, v, [300])
    wanted = attended_uncompressed(q, k, v)
    exact, fast = (relative_rms(attended(q, pages, on), wanted) for on in (True, False))
    assert exact < 1e-2
    # byte products add little to the error of eight bits on every processor
    assert fast < 1.3 * exact


@CONTRACTS
def test_calibration_improves_four_bits(on):
    torch.manual_seed(2)
    k, v, keys = real_looking(300)
    q = torch.randn(1, 4, WIDTH) * 0.1
    truth = attended_uncompressed(q, k, v)
    bare, left_out = (appended(made(300, (4, 8), c), k, v, [300]) for c in (None, keys))
    errors = [relative_rms(attended(q, pages, on), truth) for pages in (bare, left_out)]
    assert errors[1] < 0.6 * errors[0]


@CONTRACTS
@pytest.mark.parametrize("steps", [[1] * 70, [33, 1, 36], [64, 6]], ids=len)
def test_steps_change_nothing(on, steps):
    torch.manual_seed(3)
    k, v, keys = real_looking(70)
    q = torch.randn(70, 4, WIDTH) * 0.1
    empty = made(70, (4, 4), keys, (2, 20))
    whole = [t.clone() for t in stored(appended(empty, k, v, [70]))]
    parts = appended(empty, k, v, steps)
    for found, expected in zip(stored(parts), whole, strict=True):
        assert torch.equal(found, expected)
    together, first = attended(q, parts, True), 0
    for new in steps:
        parts.lengths.fill_(first + new)
        alone = attended(q[first : first + new], parts, on)
        assert relative_rms(alone, together[first : first + new]) < (1e-5 if on else 1e-2)
        first += new


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_rotated_and_rounded_once(dtype):
    torch.manual_seed(4)
    k, v = torch.randn(40, HEADS, WIDTH), torch.randn(40, HEADS, WIDTH)
    # values halfway between two numbers, too large, too small, and NaN
    v[0], v[1], v[2], v[3, 0, 0] = 0.0, 1e6, 1e-7, torch.nan
    pages = made(40, (4, 4), None, (1, 8))
    head, recent = (
        KVPages(each.k.to(dtype), each.v.to(dtype), each.table, each.lengths) for each in full_precision_pages(pages)
    )
    appended(replace(pages, full_precision=FullPrecisionKV(head, recent, 8)), k, v, [40])
    for rows, x in ((recent.k, k), (recent.v, v)):
        places = recent.table[0, torch.arange(40) // PAGE].long(), torch.arange(40) % PAGE
        expected = rotate.reference(x, SEED).to(dtype)
        torch.testing.assert_close(rows[places[0], :, places[1]], expected, rtol=0, atol=0, equal_nan=True)


@CONTRACTS
@pytest.mark.parametrize("new", [1, 3, 80])
@pytest.mark.parametrize("window", [None, 50])
def test_nothing_is_read_twice_or_from_the_wrong_place(on, new, window):
    """Every code that all queries read in full precision is NaN, and so is every full-precision row that none reads."""
    torch.manual_seed(5)
    length, first, recent_window = 200, 2, 20
    k, v, keys = real_looking(length)
    options = {} if window is None else {"window": window}
    pages, q = appended(made(length, (8, 4), keys, (first, recent_window)), k, v, [length]), torch.randn(new, 4, WIDTH) * 0.3
    expected = attended(q, pages, on, **options)
    recent = full_precision_pages(pages)[1]
    for a, b in ((0, first), (length - recent_window, length)):
        page, slot = pages.rows_of(0, a, b)
        pages.key_norms[page, :, slot] = pages.value_norms[page, :, slot] = torch.nan
    page, slot = recent.table[0, torch.arange(length) // PAGE].long(), torch.arange(length) % PAGE
    unused = torch.arange(length) <= length - new - recent_window
    unused[:first] = True
    for rows in (recent.k, recent.v):
        rows[page[unused], :, slot[unused]] = torch.nan
    assert torch.equal(attended(q, pages, on, **options), expected)


@pytest.mark.parametrize("new", [3, 80])
def test_a_full_precision_value_reaches_the_queries_that_see_it_and_no_others(new):
    torch.manual_seed(6)
    k, v = torch.randn(200, HEADS, WIDTH), torch.randn(200, HEADS, WIDTH)
    pages = appended(made(200, (8, 4), None, (1, 32)), k, v, [200])
    recent = full_precision_pages(pages)[1]
    recent.v[int(recent.table[0, 199 // PAGE]), 1, 199 % PAGE] = torch.nan
    found = attended(torch.randn(new, 4, WIDTH), pages, True)
    assert found[-1, 2:].isnan().all()
    assert not found[-1, :2].isnan().any()
    assert not found[:-1].isnan().any()


@CONTRACTS
def test_queries_that_see_no_code_or_nothing_at_all(on):
    """All positions are in the recent window, then outside."""
    torch.manual_seed(7)
    k, v = torch.randn(20, HEADS, WIDTH), torch.randn(20, HEADS, WIDTH)
    pages = appended(made(20, (4, 4), None, (1, 32)), k, v, [20])
    for new in (1, 20):
        q = torch.randn(new, 4, WIDTH)
        assert relative_rms(attended(q, pages, on), attended_uncompressed(q, k, v)) < 1e-5
        assert torch.equal(attended(q, pages, on, window=0), torch.zeros_like(q))


@CONTRACTS
@pytest.mark.parametrize("new", [1, 4, 60])
def test_blocks_joined_are_the_attention_over_all(on, new):
    torch.manual_seed(8)
    k, v, keys = real_looking(150)
    pages, q = appended(made(150, (8, 4), keys, (1, 32)), k, v, [150]), torch.randn(new, 4, WIDTH) * 0.3
    sinks = torch.randn(4)
    with exact(on):
        found = turboquant_partials(q, pages, torch.tensor([0, new], dtype=torch.int32), WIDTH**-0.5, 40, sinks=sinks)
    joined = rotate(merge_partials(*found).view(q.shape), SEED, inverse=True)
    with exact(on):
        expected = turboquant_attention(q, pages, torch.tensor([0, new], dtype=torch.int32), WIDTH**-0.5, sinks=sinks)
    assert relative_rms(joined, expected) < (1e-5 if on else 1e-2)


def test_a_recorded_step_reads_current_values_when_replayed():
    torch.manual_seed(9)
    k, v, keys = real_looking(200)
    pages, one = appended(made(200, (8, 4), keys, (1, 32)), k, v, [200]), torch.tensor([0, 1], dtype=torch.int32)
    q, new_k, new_v = torch.randn(1, 4, WIDTH) * 0.3, k[100:101].clone(), v[100:101].clone()

    def step() -> Tensor:
        append_codes(new_k, new_v, pages, one)
        return turboquant_attention(q, pages, one, WIDTH**-0.5)

    pages.lengths.fill_(101)
    step()
    with record() as recording:
        out = step()
    assert recording.rejected is None
    for position in (101, 150, 199):
        new_k.copy_(k[position]), new_v.copy_(v[position])
        pages.lengths.fill_(position + 1)
        recording.replay()
        replayed = out.clone()
        assert torch.equal(replayed, step())


def test_a_full_precision_page_outside_the_pool_is_refused():
    torch.manual_seed(10)
    k, v, one = torch.randn(100, HEADS, WIDTH), torch.randn(100, HEADS, WIDTH), torch.tensor([0, 1], dtype=torch.int32)
    pages = appended(made(100, (4, 4), None, (1, 32)), k, v, [100])
    head, recent = full_precision_pages(pages)
    # outside the window: not read
    recent.table[0, 3] = 99
    attended(torch.randn(1, 4, WIDTH), pages, True)
    recent.table[0, 4] = 99
    with pytest.raises(InputError, match="page 4 of sequence 0 is 99"):
        attended(torch.randn(1, 4, WIDTH), pages, True)
    recent.table[0, 6] = -1
    with pytest.raises(InputError, match="page 6 of sequence 0 is -1"):
        append_codes(k[:1], v[:1], pages, one)
    recent.table[0, 4:7] = 0
    head.table[0, 0] = 1
    with pytest.raises(InputError, match="page 0 of the first positions of sequence 0 is 1 in the table; the pool has 1"):
        attended(torch.randn(1, 4, WIDTH), pages, True)
