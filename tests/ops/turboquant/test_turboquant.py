"""Attention on codes equals attention on decoded vectors; pages of codes, appends and refusals."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._cases import relative_rms
from auraflux.ops._dispatch import exact
from auraflux.ops.attention.reference import merge_partials
from auraflux.ops.turboquant.cases.inputs import WIDTHS, attend, code_pages, edges
from auraflux.ops.turboquant.codebook import BITS
from auraflux.ops.turboquant.pages import CodePages
from auraflux.ops.turboquant.reference import (
    append_codes,
    decode,
    encode,
    rotate,
    turboquant_attention,
    turboquant_partials,
    turboquant_values,
)
from tests.ops.quick import some


@pytest.fixture(autouse=True)
def _seeded_and_exact():
    torch.manual_seed(0)
    # attention on codes is held to float tolerance here; the cost of rounding is tested in test_cpu.py
    with exact():
        yield


def gathered(pages: CodePages, sequence: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Decode the keys and values of a sequence from a position on, [Hkv, positions, D]."""
    size = pages.pool[1]
    places = [(int(pages.table[sequence, t // size]), t % size) for t in range(first, int(pages.lengths[sequence]))]

    def read(codes: Tensor, norms: Tensor, bits: int) -> Tensor:
        rows = torch.stack([codes[page, :, slot] for page, slot in places], 1)
        return decode(rows, torch.stack([norms[page, :, slot] for page, slot in places], 1), bits, pages.width, pages.seed)

    keys = read(pages.key_codes, pages.key_norms, pages.key_bits)
    return keys, read(pages.value_codes, pages.value_norms, pages.value_bits)


def attention_on_decoded(
    q: Tensor,
    pages: CodePages,
    starts: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute attention in float64 over decoded vectors, one query at a time."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b, length in enumerate(pages.lengths.tolist()):
        start, stop = int(starts[b]), int(starts[b + 1])
        if start == stop:
            continue
        oldest = 0 if window is None else max(0, length - (stop - start) + 1 - window)
        keys, vals = (x.double() for x in gathered(pages, b, oldest))
        for row, h in product(range(start, stop), range(q.shape[1])):
            at, group = length - stop + row, h // (q.shape[1] // pages.heads)
            first = oldest if window is None else max(0, at - window + 1)
            visible = slice(first - oldest, at + 1 - oldest)
            scores = keys[group, visible] @ q[row, h].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            total = weights.sum() + (0 if sinks is None else sinks[h].double().exp())
            out[row, h] = weights @ vals[group, visible] / total
    return out.float()


OPTIONS = {
    "plain": {},
    "sinks": {"sinks": True},
    "window": {"window": 5},
    "softcap": {"softcap": 2.0},
    "all": {"window": 18, "sinks": True, "softcap": 4.0},
}


@pytest.mark.parametrize("pair", list(product(BITS, BITS)), ids=lambda pair: "k{}v{}".format(*pair))
def test_attention_on_codes_is_attention_on_decoded_vectors(pair):
    args = attend([21], [2], (4, 2), 64, bits=pair)
    assert relative_rms(turboquant_attention(**args), attention_on_decoded(**args)) < 1e-5


@pytest.mark.parametrize("width", some([100, *WIDTHS], (64, 100, 128)))
def test_attention_at_every_width(width):
    args = attend([9, 18], [1, 2], (4, 2), width, bits=(8, 4))
    assert relative_rms(turboquant_attention(**args), attention_on_decoded(**args)) < 1e-5


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_of_ragged_batches(options):
    args = attend([20, 1, 0, 37, 12], [3, 1, 0, 1, 12], (6, 3), 64, bits=(6, 3), **options)
    assert relative_rms(turboquant_attention(**args), attention_on_decoded(**args)) < 1e-5


@pytest.mark.parametrize("block", [1, 7, 16, 1000])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_partials_merge_to_the_attention(block, options):
    args = attend([20, 0, 37], [3, 0, 1], (6, 3), 100, **options)
    o, m, l = turboquant_partials(**args, block=block)  # noqa: E741
    blocks = -(-args["pages"].capacity // block) + ("sinks" in args)
    assert o.shape == (24, blocks, 100)
    assert m.shape == l.shape == (24, blocks)
    assert l[m == -torch.inf].eq(0).all()
    assert o[m == -torch.inf].eq(0).all()
    found = rotate(merge_partials.reference(o, m, l).view(4, 6, 100), args["pages"].seed, inverse=True)
    assert relative_rms(found, attention_on_decoded(**args)) < 1e-5


@pytest.mark.parametrize("sinks", [False, True])
def test_nothing_visible_gives_zeros(sinks):
    args = attend([20, 3], [2, 3], (4, 2), 64, window=0, sinks=sinks)
    assert turboquant_attention(**args).eq(0).all()
    *_, l = turboquant_partials(**args, block=8)  # noqa: E741
    assert l.sum() == (20 if sinks else 0)


def test_sinks_are_one_block():
    args = attend([40], [1], (4, 2), 64, sinks=True)
    o, m, l = turboquant_partials(**args, block=8)  # noqa: E741
    assert torch.equal(m[:, -1], args["sinks"])
    assert l[:, -1].eq(1).all()
    assert o[:, -1].eq(0).all()
    rest = turboquant_partials(**{**args, "sinks": None}, block=8)
    for with_sinks, without in zip((o, m, l), rest, strict=True):
        assert torch.equal(with_sinks[:, :-1], without)


def test_where_pages_lie_does_not_matter():
    args = attend([50, 33], [2, 1], (4, 2), 64)
    pages = args["pages"]
    order = torch.randperm(pages.key_codes.shape[0])
    moved = replace(
        pages,
        key_codes=pages.key_codes[order],
        key_norms=pages.key_norms[order],
        value_codes=pages.value_codes[order],
        value_norms=pages.value_norms[order],
        table=torch.where(pages.table >= 0, order.argsort()[pages.table.clamp(min=0)].int(), pages.table),
    )
    assert torch.equal(turboquant_attention(**args), turboquant_attention(**{**args, "pages": moved}))


def test_pages_before_the_window_may_be_freed():
    args = attend([100, 61], [1, 4], (4, 2), 64, window=20, freed=[5, 2])
    with pytest.raises(InputError, match="page 4 of sequence 0 is -12345"):
        turboquant_attention(**{**args, "window": 21})
    assert relative_rms(turboquant_attention(**args), attention_on_decoded(**args)) < 1e-5


def test_no_tokens_at_all():
    args = attend([20, 0], [0, 0], (4, 2), 64, sinks=True)
    assert turboquant_attention(**args).shape == (0, 4, 64)
    empty = replace(args["pages"], table=torch.zeros(2, 0).int(), lengths=torch.zeros(2).int())
    assert turboquant_attention(**{**args, "pages": empty}).shape == (0, 4, 64)


def test_later_tokens_are_not_seen():
    args = attend([30], [10], (4, 2), 64)
    out = turboquant_attention(**args)
    pages, last = args["pages"], args["pages"].rows_of(0, 25, 30)
    pages.key_norms[last[0], :, last[1]] *= -3
    pages.value_norms[last[0], :, last[1]] = math.nan
    again = turboquant_attention(**args)
    assert torch.equal(again[:5], out[:5])
    assert again[5:].isnan().all()


@pytest.mark.parametrize("width", [100, 64])
def test_append_then_decode(width):
    pages = code_pages([21, 0, 40, 16], 2, width, bits=(6, 3))
    before = pages.key_codes.clone()
    starts, tokens = edges([5, 0, 1, 0]), 6
    k, v = torch.randn(tokens, 2, width), torch.randn(tokens, 2, width)
    append_codes(k, v, pages, starts)
    for b, (start, stop) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        length = int(pages.lengths[b])
        if stop > start:
            keys, vals = gathered(pages, b, length - (stop - start))
            new = k[start:stop].contiguous(), v[start:stop].contiguous()
            torch.testing.assert_close(keys.movedim(1, 0), decode(*encode(new[0], 6, pages.seed), 6, width, pages.seed))
            torch.testing.assert_close(vals.movedim(1, 0), decode(*encode(new[1], 3, pages.seed), 3, width, pages.seed))
    # six rows of two heads changed: overwritten, not added to
    assert (pages.key_codes != before).any(-1).sum() == 12


def test_append_token_by_token_equals_append_at_once():
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    k, v = torch.randn(11, 2, 100), torch.randn(11, 2, 100)
    whole = CodePages.empty(3, 2, 4, 100, table, torch.tensor([11], dtype=torch.int32), 3, 6)
    append_codes(k, v, whole, edges([11]))
    steps = CodePages.empty(3, 2, 4, 100, table, torch.tensor([0], dtype=torch.int32), 3, 6)
    for t in range(11):
        steps.lengths[0] = t + 1
        append_codes(k[t : t + 1], v[t : t + 1], steps, edges([1]))
    for name in ("key_codes", "key_norms", "value_codes", "value_norms"):
        assert torch.equal(getattr(whole, name), getattr(steps, name))


def test_a_page_is_reused_after_the_window_moved_on():
    # a ring of three pages of four rows serves a window of eight, past the wrap
    k, v, q = torch.randn(30, 2, 64), torch.randn(30, 2, 64), torch.randn(30, 4, 64)
    ring = CodePages.empty(3, 2, 4, 64, (torch.arange(8) % 3).int().view(1, -1), torch.zeros(1, dtype=torch.int32), 4, 4)
    full = CodePages.empty(8, 2, 4, 64, torch.arange(8).int().view(1, -1), torch.zeros(1, dtype=torch.int32), 4, 4)
    for t in range(30):
        outs = []
        for pages in (ring, full):
            pages.lengths[0] = t + 1
            append_codes(k[t : t + 1], v[t : t + 1], pages, edges([1]))
            outs.append(turboquant_attention(q[t : t + 1], pages, edges([1]), 0.125, window=8))
        assert torch.equal(*outs)


@pytest.mark.parametrize("bits", BITS)
def test_values_are_the_weighed_sum_of_decoded_vectors(bits):
    x = torch.randn(2, 50, 100)
    codes, norms = encode(x, bits, 4)
    weights = torch.softmax(torch.randn(6, 50), -1)
    found = rotate(turboquant_values(weights, codes, norms, bits, 100), 4, inverse=True)
    expected = weights.view(2, 3, 50) @ decode(codes, norms, bits, 100, 4)
    assert relative_rms(found, expected.flatten(0, 1)) < 1e-5


def test_values_below_the_threshold_are_skipped():
    codes, norms = encode(torch.randn(1, 4, 64), 4, 0)
    norms[0, 1] = math.nan
    weights = torch.tensor([[0.5, 1e-7, 0.2, 0.3]])
    found = turboquant_values(weights, codes, norms, 4, 64, threshold=1e-6)
    selected = [0, 2, 3]
    expected = turboquant_values(weights[:, selected], codes[:, selected], norms[:, selected], 4, 64)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("sinks", [False, True])
def test_the_threshold_is_a_share_of_all_weights(sinks):
    args = attend([50], [1], (2, 2), 64, sinks=sinks)
    keys, vals = gathered(args["pages"], 0)
    scores = (keys @ args["q"][0].unsqueeze(-1)).squeeze(-1) * args["scale"]
    weights = torch.softmax(scores, -1)
    # between two of them, so that rounding does not decide
    threshold = weights.flatten().sort().values[49:51].mean().item()
    selected = weights.masked_fill(weights < threshold, 0)
    if sinks:
        selected = selected / (1 + torch.exp(args["sinks"] - torch.logsumexp(scores, -1)))[:, None]
    expected = (selected.unsqueeze(1) @ vals).squeeze(1)
    assert relative_rms(turboquant_attention.reference(**args, threshold=threshold)[0], expected) < 1e-5


def bad(message: str, call, *args, **kwargs):
    with pytest.raises(InputError, match=message):
        call(*args, **kwargs)


def test_bits_and_widths_that_do_not_exist():
    x = torch.randn(2, 64)
    bad("'bits' is 5; codebooks exist for 2, 3, 4, 6, 8 bits", encode, x, 5, 0)
    bad("width 4 cannot be quantized; 8 to 1024", encode, torch.randn(2, 4), 4, 0)
    bad("width 2048 cannot be quantized", rotate, torch.randn(2, 2048), 0)
    bad("'seed' is -1; an integer from 0", rotate, x, -1)
    bad("'x' has dtype float64; float32 or bfloat16 or float16", encode, x.double(), 4, 0)
    bad("'x' .* is not contiguous", encode, torch.randn(64, 64).T, 4, 0)
    bad(r"'codes' has shape \[2, 8\]; \[2, 6\] is needed", decode, torch.zeros(2, 8).int(), torch.ones(2), 3, 64, 0)
    bad("'codes' has dtype float32; int32", decode, torch.zeros(2, 8), torch.ones(2), 4, 64, 0)
    bad(
        "'weights' has 3 heads; a multiple of the 2",
        turboquant_values,
        torch.ones(3, 1),
        *encode(x.view(2, 1, 64), 4, 0),
        4,
        64,
    )


def test_pages_that_do_not_fit_together():
    pages = code_pages([20], 2, 64)
    bad("'key_bits' is 7", replace, pages, key_bits=7)
    bad(r"'value_codes' has shape .*; \[3, 2, 16, 16\]", replace, pages, value_bits=8)
    bad("'lengths' has shape", replace, pages, lengths=torch.ones(2, dtype=torch.int32))
    bad("'table' has dtype int64; int32", replace, pages, table=pages.table.long())
    bad("'key_norms' has dtype float16; float32", replace, pages, key_norms=pages.key_norms.half())


def test_steps_that_do_not_fit_the_pages():
    args = attend([20, 9], [2, 1], (4, 2), 64)
    pages = args["pages"]

    def changed(**changes):
        return {**args, **changes}

    def with_pages(**changes):
        return changed(pages=replace(pages, **changes))

    run = turboquant_attention
    bad(r"'q' has shape \[3, 4, 32\]; \[any, any, 64\]", run, **changed(q=torch.randn(3, 4, 32)))
    bad("'q' has 3 heads; a multiple of the 2", run, **changed(q=torch.randn(3, 3, 64)))
    bad(r"'starts' \[0, 2, 4\] do not increase from 0 to 3", run, **changed(starts=edges([2, 2])))
    bad(r"'starts' has shape \[2\]; \[3\]", run, **changed(starts=edges([3])))
    bad("'window' is -1; it must be", run, **changed(window=-1))
    bad("'softcap' is 0.0; a positive number", run, **changed(softcap=0.0))
    bad(r"'sinks' has shape \[2\]; \[4\]", run, **changed(sinks=torch.zeros(2)))
    bad("'block' is 0; at least one token", turboquant_partials, **args, block=0)
    bad("sequence 1 of length 999 needs 63 pages", run, **with_pages(lengths=torch.tensor([20, 999]).int()))
    bad("sequence 0 has length 1 but gets 2 tokens", run, **with_pages(lengths=torch.tensor([1, 9]).int()))
    bad("page 0 of sequence 0 is 4 in the table", run, **with_pages(table=torch.full((2, 3), 4).int()))


def test_a_refused_append_writes_nothing():
    pages = code_pages([20, 9], 2, 64)
    pages.table[1, 0] = 99
    before = {name: getattr(pages, name).clone() for name in ("key_codes", "key_norms", "value_codes", "value_norms")}
    bad("page 0 of sequence 1 is 99", append_codes, torch.randn(2, 2, 64), torch.randn(2, 2, 64), pages, edges([1, 1]))
    assert all(torch.equal(getattr(pages, name), tensor) for name, tensor in before.items())
