"""CPU kernels on codes beyond parity with the reference: accuracy on peaked scores, exact codes, faults, NaN."""

import pytest
import torch

from auraflux.errors import InputError
from auraflux.ops._cases import relative_rms
from auraflux.ops._dispatch import exact
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.jit import Kernel, arguments
from auraflux.ops.simd.threads import set_threads, threads
from auraflux.ops.turboquant.codebook import boundaries, codebook
from auraflux.ops.turboquant.cpu.quantize import CHUNK, quantize_chunks, search_table
from auraflux.ops.turboquant.pages import CodePages, unpack
from auraflux.ops.turboquant.reference import append_codes, encode, turboquant_attention
from tests.ops.quick import some

WIDTH, PAGE, HEADS = 128, 64, 2


def filled(bits: tuple[int, int], tokens: int) -> CodePages:
    """Return pages of one sequence with encoded random keys and values."""
    count = -(-tokens // PAGE)
    table = torch.randperm(count).int()[None]
    (keys, key_norms), (values, value_norms) = (encode(torch.randn(count, HEADS, PAGE, WIDTH), b, 7) for b in bits)
    lengths = torch.tensor([tokens], dtype=torch.int32)
    return CodePages(keys, key_norms, values, value_norms, table, lengths, *bits, WIDTH, 7)


def attend(q: torch.Tensor, pages: CodePages, on: bool, **options: float) -> torch.Tensor:
    with exact(on):
        return turboquant_attention(q, pages, torch.tensor([0, 1], dtype=torch.int32), WIDTH**-0.5, **options)


@pytest.mark.parametrize("bits", [(4, 4), (8, 4), (4, 2), (2, 2), (3, 3), (6, 6), (8, 8)])
@pytest.mark.parametrize("spread", [0.0, 0.5, 1.6])
def test_rounding_stays_within_one_percent(bits, spread):
    torch.manual_seed(1)
    pages, q = filled(bits, 2000), torch.randn(1, 8, WIDTH) * spread
    assert 0 < relative_rms(attend(q, pages, False), attend(q, pages, True)) < 1e-2


def test_one_key_takes_all_the_weight():
    torch.manual_seed(2)
    pages = filled((8, 4), 500)
    q = torch.randn(1, 8, WIDTH) * 50
    # large scores enlarge the error of a level, which is larger where keys of eight bits are interpolated
    assert relative_rms(attend(q, pages, False), attend(q, pages, True)) < (6e-2 if ISA.small_tables else 3e-2)


@pytest.mark.parametrize("where", ["q", "key_norms", "value_norms"])
@pytest.mark.parametrize("on", [False, True])
def test_not_a_number_reaches_the_heads_that_see_it_and_no_others(where, on):
    torch.manual_seed(3)
    pages, q = filled((4, 4), 300), torch.randn(1, 4, WIDTH)
    if where == "q":
        q[0, 1, 5] = torch.nan
        hit = [1]
    else:
        getattr(pages, where)[int(pages.table[0, 1]), 1, 3] = torch.nan
        hit = [2, 3]
    found = attend(q, pages, on)
    assert [h for h in range(4) if found[0, h].isnan().any()] == hit
    assert found[0, hit].isnan().all()


def test_a_page_outside_the_pool_is_refused():
    pages, one = filled((4, 4), 300), torch.tensor([0, 1], dtype=torch.int32)
    pages.table[0, 2] = 99
    with pytest.raises(InputError, match="page 2 of sequence 0 is 99"):
        attend(torch.randn(1, 4, WIDTH), pages, False)
    pages.table[0, 4] = -1
    before = pages.key_codes.clone()
    with pytest.raises(InputError, match="page 4 of sequence 0 is -1"):
        append_codes(torch.randn(1, HEADS, WIDTH), torch.randn(1, HEADS, WIDTH), pages, one)
    assert torch.equal(pages.key_codes, before)


@pytest.fixture
def _one_thread():
    before = threads()
    set_threads(1)
    yield
    set_threads(before)


# threads would split the positions and know only their part of the weights
@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("on", [False, True])
def test_values_without_weight_are_not_read(on):
    """Only two keys are long: with a threshold, NaN values after one of them are not read."""
    torch.manual_seed(4)
    pages, q = filled((8, 4), 1000), torch.randn(1, 4, WIDTH)
    pages.key_norms[:] = 0
    for position in (10, 900):
        # keys that score above 20 with every query
        page, slot = pages.rows_of(0, position, position + 1)
        codes, norms = encode(q.view(HEADS, 2, WIDTH).sum(1) * 2, 8, 7)
        pages.key_codes[page, :, slot], pages.key_norms[page, :, slot] = codes, norms
    whole = attend(q, pages, on)
    assert relative_rms(attend(q, pages, on, threshold=1e-6), whole) < 1e-4
    # within the split of 512 positions that starts with a long key: splits are independent
    far = pages.rows_of(0, 300, 500)
    pages.value_norms[far[0], :, far[1]] = torch.nan
    assert attend(q, pages, on).isnan().all()
    assert relative_rms(attend(q, pages, on, threshold=1e-6), whole) < 1e-4


@pytest.mark.parametrize("on", [False, True])
def test_no_value_with_its_share_is_skipped(on):
    """Equal keys have equal shares: all are read at a threshold just below, for any split of the positions."""
    pages, q = filled((4, 4), 400), torch.zeros(1, 4, WIDTH)
    assert torch.equal(attend(q, pages, on, threshold=0.99 / 400), attend(q, pages, on))


def test_a_threshold_that_is_no_share_is_refused():
    pages, q = filled((4, 4), 70), torch.zeros(1, 4, WIDTH)
    for threshold in (-0.1, 1.0, float("nan")):
        with pytest.raises(InputError, match=r"'threshold' is .*; a share of all weights is needed"):
            attend(q, pages, True, threshold=threshold)


WAYS = pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])


@WAYS
@pytest.mark.parametrize("width", some([8, 63, 64, 100, 512], (8, 63, 64, 100)))
def test_codes_are_those_of_the_reference_to_the_last_bit(bits, width):
    torch.manual_seed(4)
    x = torch.randn(40, width) * torch.logspace(-38, 38, 40)[:, None]
    x[3] = 0.0
    # NaN of either sign is above all levels
    x[5, 1], x[6, 2], x[7, 3] = torch.nan, -torch.nan, torch.inf
    for found, expected in zip(encode(x, bits, 7), encode.reference(x, bits, 7), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@Kernel
def _quantize(args, job, jobs):
    bits, y, chunks, table, words, total = arguments(args, 6)
    quantize_chunks(bits, y, chunks, table, words, total)


@WAYS
def test_a_coordinate_on_a_boundary_takes_the_lower_level(bits):
    """Return rotated rows of the boundaries themselves, their neighbours and both zeros."""
    middles = boundaries(bits, 1024)
    ends = torch.tensor([torch.inf, -torch.inf])
    y = torch.cat([middles, torch.nextafter(middles, ends[0]), torch.nextafter(middles, ends[1]), torch.tensor([0.0, -0.0])])
    y = torch.nn.functional.pad(y, (0, -len(y) % CHUNK)).contiguous()
    words, total = torch.zeros(len(y) * bits // 32, dtype=torch.int32), torch.zeros(1, dtype=torch.float64)
    addresses = search_table(bits, 1024).ctypes.data, words.data_ptr(), total.data_ptr()
    _quantize(1, bits, y.data_ptr(), len(y) // CHUNK, *addresses)
    codes = torch.bucketize(y, middles)
    assert torch.equal(unpack(words, bits, len(y)), codes)
    torch.testing.assert_close(total[0], codebook(bits, 1024)[codes].double().square().sum())
