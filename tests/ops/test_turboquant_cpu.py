"""What parity with the reference does not show of the CPU kernels on codes: accuracy on peaked scores, faults, bad numbers."""

import pytest
import torch

from auraflux.errors import InputError
from auraflux.ops._cases import relative_rms
from auraflux.ops._dispatch import exact
from auraflux.ops.turboquant.pages import CodePages
from auraflux.ops.turboquant.reference import append_codes, encode, turboquant_attention

WIDTH, PAGE, HEADS = 128, 64, 2


def filled(bits: tuple[int, int], tokens: int) -> CodePages:
    """Pages of one sequence with encoded random keys and values."""
    count = -(-tokens // PAGE)
    table = torch.randperm(count).int()[None]
    (keys, key_norms), (values, value_norms) = (encode(torch.randn(count, HEADS, PAGE, WIDTH), b, 7) for b in bits)
    lengths = torch.tensor([tokens], dtype=torch.int32)
    return CodePages(keys, key_norms, values, value_norms, table, lengths, *bits, WIDTH, 7)


def attend(q: torch.Tensor, pages: CodePages, on: bool) -> torch.Tensor:
    with exact(on):
        return turboquant_attention(q, pages, torch.tensor([0, 1], dtype=torch.int32), WIDTH**-0.5)


@pytest.mark.parametrize("bits", [(4, 4), (8, 4)])
@pytest.mark.parametrize("spread", [0.0, 0.5, 1.6])
def test_rounding_stays_within_one_percent(bits, spread):
    torch.manual_seed(1)
    pages, q = filled(bits, 2000), torch.randn(1, 8, WIDTH) * spread
    assert 0 < relative_rms(attend(q, pages, False), attend(q, pages, True)) < 1e-2


def test_one_key_takes_all_the_weight():
    torch.manual_seed(2)
    pages = filled((8, 4), 500)
    q = torch.randn(1, 8, WIDTH) * 50
    assert relative_rms(attend(q, pages, False), attend(q, pages, True)) < 3e-2


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
