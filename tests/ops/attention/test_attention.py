"""Paged attention against torch and transformers, and invariants that hold for any input."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from auraflux.errors import InputError
from auraflux.ops._cases import relative_rms
from auraflux.ops._dispatch import use_backend
from auraflux.ops.attention._inputs import starts_of
from auraflux.ops.attention.cases import kv_pages, queries
from auraflux.ops.attention.pages import KVPages
from auraflux.ops.attention.reference import append_kv, attention, merge_partials

BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])


def dense(pages: KVPages, sequence: int = 0) -> tuple[Tensor, Tensor]:
    """Return a sequence's keys and values in order: [1, Hkv, L, D]."""
    length, rows = int(pages.lengths[sequence]), pages.table[sequence].long()
    k, v = (t[rows].transpose(0, 1).flatten(1, 2)[:, :length].float()[None] for t in (pages.k, pages.v))
    return k, v


def one_sequence(length: int, new: int, heads: tuple[int, int], width: int, **options) -> tuple[Tensor, KVPages, Tensor]:
    torch.manual_seed(length * new + width)
    return torch.randn(new, heads[0], width), kv_pages([length], heads[1], width, **options), starts_of([new])


def visible(new: int, length: int, window: int | None = None) -> Tensor:
    position, key = torch.arange(length - new, length)[:, None], torch.arange(length)
    return (key <= position) & (key > position - (window or length + 1))


@BACKENDS
@pytest.mark.parametrize(
    ("length", "new", "heads", "width"),
    [(100, 1, (8, 2), 64), (333, 1, (3, 3), 128), (50, 50, (8, 2), 64), (130, 40, (4, 1), 80), (97, 97, (2, 2), 63)],
)
def test_equals_torch(backend, length, new, heads, width):
    q, pages, starts = one_sequence(length, new, heads, width, page=7)
    k, v = dense(pages)
    expected = scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=visible(new, length), enable_gqa=True)
    with use_backend(backend):
        found = attention(q, pages, starts, width**-0.5)
    assert relative_rms(found, expected[0].transpose(0, 1)) < 2e-6


@BACKENDS
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("length", "new"), [(40, 40), (33, 1)])
def test_sinks_equal_transformers(backend, window, length, new):
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    q, pages, starts = one_sequence(length, new, (8, 2), 64)
    sinks = torch.randn(8)
    k, v = dense(pages)
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks, module.training = 4, sinks, False
    mask = torch.zeros(new, length).masked_fill(~visible(new, length, window), -torch.inf)[None, None]
    expected, _ = modeling.eager_attention_forward(module, q.transpose(0, 1)[None], k, v, mask, scaling=0.125)
    with use_backend(backend):
        found = attention(q, pages, starts, 0.125, window=window, sinks=sinks)
    assert relative_rms(found, expected[0]) < 2e-6


@BACKENDS
@pytest.mark.parametrize(("length", "new"), [(40, 40), (33, 1)])
def test_softcap_equals_transformers(backend, length, new):
    modeling = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    q, pages, starts = one_sequence(length, new, (4, 2), 256)
    q *= 20  # far into the cap
    k, v = dense(pages)
    module = torch.nn.Module()
    module.num_key_value_groups, module.training = 2, False
    mask = torch.zeros(new, length).masked_fill(~visible(new, length), -torch.inf)[None, None]
    given = q.transpose(0, 1)[None], k, v, mask
    expected, _ = modeling.eager_attention_forward(module, *given, scaling=0.0625, softcap=50.0)
    with use_backend(backend):
        found = attention(q, pages, starts, 0.0625, softcap=50.0)
    assert relative_rms(found, expected[0]) < 5e-6


@BACKENDS
def test_page_order_does_not_matter(backend):
    q, pages, starts = one_sequence(100, 20, (8, 2), 64)
    order = torch.randperm(pages.k.shape[0])
    moved = KVPages(pages.k[order], pages.v[order], order.argsort()[pages.table.long()].int(), pages.lengths)
    with use_backend(backend):
        assert torch.equal(attention(q, moved, starts, 0.125), attention(q, pages, starts, 0.125))


@BACKENDS
@pytest.mark.parametrize("window", [None, 12])
def test_chunked_prefill_equals_prefill(backend, window):
    length, heads, width = 45, 4, 64
    torch.manual_seed(0)
    q, k, v = (torch.randn(length, n, width) for n in (heads, 2, 2))
    sinks = torch.randn(heads)

    def run(chunks: list[int]) -> Tensor:
        pages, done, found = kv_pages([length], 2, width, page=7), 0, []
        for new in chunks:
            now, done = slice(done, done + new), done + new
            pages.lengths[0] = done
            append_kv(k[now], v[now], pages, starts_of([new]))
            found.append(attention(q[now], pages, starts_of([new]), 0.125, window=window, sinks=sinks))
        return torch.cat(found)

    with use_backend(backend):
        at_once = run([length])
        assert relative_rms(run([13, 1, 31]), at_once) < 1e-6
        assert relative_rms(run([1] * length), at_once) < 1e-6


@BACKENDS
def test_future_keys_are_masked(backend):
    q, pages, starts = one_sequence(60, 60, (8, 2), 64)
    with use_backend(backend):
        before = attention(q, pages, starts, 0.125)
        page, slot = pages.table[0, 41 // 16].long(), 41 % 16
        pages.k[page, :, slot] += 1
        pages.v[page, :, slot] += 1
        after = attention(q, pages, starts, 0.125)
    assert torch.equal(after[:41], before[:41])
    assert (after[41:] != before[41:]).any(-1).all()


@BACKENDS
@pytest.mark.parametrize("new", [1, 30])
def test_window_ends_where_it_should(backend, new):
    length, window = 80, 23
    q, pages, starts = one_sequence(length, new, (4, 2), 64)
    first = length - new - window + 1  # the oldest key visible to the first query

    def poke(position: int) -> Tensor:
        pages.v[pages.table[0, position // 16].long(), :, position % 16] += 100
        return attention(q, pages, starts, 0.125, window=window)

    with use_backend(backend):
        before = attention(q, pages, starts, 0.125, window=window)
        assert torch.equal(poke(first - 1), before)
        changed = poke(first) != before
    assert changed[0].all()
    assert not changed[1:].any()


@BACKENDS
@pytest.mark.parametrize("new", [1, 40])
def test_nan_does_not_spread(backend, new):
    q, pages, starts = one_sequence(40, new, (4, 2), 64)
    last = pages.table[0, 2]
    pages.v[last, 0, 6] = torch.nan  # position 38, first key head
    pages.k[last, 1, 7] = torch.nan  # position 39, second
    pages.k[last, :, 8:] = torch.nan  # beyond the end
    pages.v[last, :, 8:] = torch.inf
    if new > 2:
        q[2, 3] = torch.nan
    with use_backend(backend):
        found = attention(q, pages, starts, 0.125).isnan()
    expected = torch.zeros_like(found)
    expected[-2:, :2] = expected[-1:, 2:] = True
    if new > 2:
        expected[2, 3] = True
    assert torch.equal(found, expected)


@BACKENDS
def test_nothing_visible_gives_zeros(backend):
    q, pages, starts = one_sequence(40, 3, (4, 2), 64)
    with use_backend(backend):
        for sinks in (None, torch.randn(4)):
            assert (attention(q, pages, starts, 0.125, window=0, sinks=sinks) == 0).all()


@BACKENDS
def test_scores_of_minus_infinity_are_invisible(backend):
    q, pages, starts = one_sequence(300, 4, (4, 2), 64)
    q[:] = 1
    unseen = pages.table[0, :9].long()
    pages.k[unseen] = -torch.inf
    k, v = dense(pages)
    # the first 144 positions fill complete blocks: the running maximum begins at -inf
    mask = visible(4, 300)[:, 144:]
    expected = scaled_dot_product_attention(q.transpose(0, 1)[None], k[:, :, 144:], v[:, :, 144:], mask, enable_gqa=True)
    with use_backend(backend):
        assert relative_rms(attention(q, pages, starts, 0.125), expected[0].transpose(0, 1)) < 2e-6


@BACKENDS
def test_large_scores_do_not_overflow(backend):
    q, pages, starts = one_sequence(300, 5, (4, 2), 64)
    k, v = dense(pages)
    q *= 1e4
    expected = scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, visible(5, 300), enable_gqa=True)
    with use_backend(backend):
        found = attention(q, pages, starts, 0.125)
    assert relative_rms(found, expected[0].transpose(0, 1)) < 1e-4


@BACKENDS
def test_empty_sequences_and_batches(backend):
    pages = kv_pages([20, 9, 3], 2, 64)
    pages.table[1], pages.lengths[1] = -1, -5  # it has no queries
    q = torch.randn(4, 4, 64)
    alone = KVPages(pages.k, pages.v, pages.table[2:].clone(), pages.lengths[2:].clone())
    with use_backend(backend):
        found = attention(q, pages, starts_of([3, 0, 1]), 0.125)
        assert relative_rms(found[3:], attention(q[3:], alone, starts_of([1]), 0.125)) < 1e-6
        assert attention(q[:0], pages, starts_of([0, 0, 0]), 0.125).shape == (0, 4, 64)
        append_kv(q[:0, :2], q[:0, :2], pages, starts_of([0, 0, 0]))


@BACKENDS
def test_append_changes_nothing_else(backend):
    pages = kv_pages([30, 8], 2, 64, page=7)
    k, v, before = torch.randn(5, 2, 64), torch.randn(5, 2, 64), pages.k.clone()
    with use_backend(backend):
        append_kv(k, v, pages, starts_of([3, 2]))
    for row, (sequence, position) in enumerate([(0, 27), (0, 28), (0, 29), (1, 6), (1, 7)]):
        place = pages.table[sequence, position // 7].long(), slice(None), position % 7
        assert torch.equal(pages.k[place], k[row])
        assert torch.equal(pages.v[place], v[row])
        before[place] = k[row]
    assert torch.equal(pages.k, before)


def broken(change: str) -> tuple[KVPages, Tensor]:
    pages, starts = kv_pages([30, 8], 2, 64, page=7), starts_of([3, 2])
    match change:
        case "page":
            pages.table[0, 4] = pages.k.shape[0]
        case "negative":
            pages.table[1, 1] = -1
        case "length":
            pages.lengths[1] = 1
        case "long":
            pages.lengths[1] = 36
        case "falling":
            starts[1] = 6
        case "few":
            starts[2] = 4
        case "late":
            starts[0] = 1
    return pages, starts


@BACKENDS
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("page", r"page 4 of sequence 0 is 13 in the table; the pool has 13 pages"),
        ("negative", r"page 1 of sequence 1 is -1 in the table"),
        ("length", r"sequence 1 has length 1 but gets 2 tokens"),
        ("long", r"sequence 1 of length 36 needs 6 pages of 7; its row of the table has 5"),
        ("falling", r"'starts' \[0, 6, 5\] do not increase from 0 to 5"),
        ("few", r"'starts' \[0, 3, 4\] do not increase from 0 to 5"),
        ("late", r"'starts' \[1, 3, 5\] do not increase"),
    ],
)
def test_positions_outside_the_pages_are_rejected(backend, change, message):
    pages, starts = broken(change)
    before = pages.k.clone()
    with use_backend(backend):
        with pytest.raises(InputError, match=message):
            attention(torch.randn(5, 4, 64), pages, starts, 0.125)
        with pytest.raises(InputError, match=message):
            append_kv(torch.randn(5, 2, 64), torch.randn(5, 2, 64), pages, starts)
    assert torch.equal(pages.k, before)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"q": torch.randn(5, 4, 63)}, r"'q' has shape \[5, 4, 63\]; \[any, any, 64\] is needed"),
        ({"q": torch.randn(5, 3, 64)}, "q has 3 heads, the cache 2"),
        ({"q": torch.randn(5, 4, 64).double()}, "'q' has dtype float64"),
        ({"q": torch.randn(4, 5, 64).transpose(0, 1)}, "'q' .* is not contiguous"),
        ({"starts": torch.tensor([0, 5])}, "'starts' has dtype int64"),
        ({"starts": starts_of([5])}, r"'starts' has shape \[2\]; \[3\]"),
        ({"sinks": torch.randn(2)}, r"'sinks' has shape \[2\]; \[4\]"),
        ({"window": -1}, "'window' is -1"),
        ({"softcap": 0.0}, "softcap is 0.0"),
    ],
)
def test_mismatched_arguments_are_rejected(given, message):
    args = {"q": torch.randn(5, 4, 64), "pages": kv_pages([30, 8], 2, 64), "starts": starts_of([3, 2]), "scale": 0.125}
    with pytest.raises(InputError, match=message):
        attention(**args | given)


def test_mismatched_pages_are_rejected():
    k, table, lengths = torch.randn(3, 2, 16, 64), torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(InputError, match=r"'v' has shape \[3, 2, 8, 64\]"):
        KVPages(k, torch.randn(3, 2, 8, 64), table, lengths)
    with pytest.raises(InputError, match="'v' has dtype bfloat16; float32"):
        KVPages(k, k.bfloat16(), table, lengths)
    with pytest.raises(InputError, match="'table' has dtype int64"):
        KVPages(k, k, table.long(), lengths)
    with pytest.raises(InputError, match=r"'lengths' has shape \[2\]"):
        KVPages(k, k, table, lengths.repeat(2))
    with pytest.raises(InputError, match="pages of 0 tokens"):
        KVPages(k[:, :, :0], k[:, :, :0], table, lengths)


@BACKENDS
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256, 512, 63])
def test_merged_splits_equal_attention(backend, width):
    torch.manual_seed(width)
    rows, keys = 5, 200
    scores, values = torch.randn(rows, keys) * 4, torch.randn(keys, width)
    expected = scores.softmax(-1) @ values
    for blocks in (1, 2, 7, 30):
        cuts = [0, *sorted(torch.randint(keys + 1, (blocks - 1,)).tolist()), keys]
        o, m = torch.full((rows, blocks, width), torch.nan), torch.full((rows, blocks), torch.nan)
        total = torch.zeros(rows, blocks)
        for i, (a, b) in enumerate(pairwise(cuts)):
            if a < b:
                m[:, i] = scores[:, a:b].amax(-1)
                weights = torch.exp(scores[:, a:b] - m[:, i : i + 1])
                o[:, i], total[:, i] = weights @ values[a:b], weights.sum(-1)
        with use_backend(backend):
            assert relative_rms(merge_partials(o, m, total), expected) < 1e-6


@BACKENDS
def test_merging_nothing_gives_zeros(backend):
    o, m = torch.full((2, 3, 64), torch.nan), torch.tensor([[torch.nan, -torch.inf, torch.inf]] * 2)
    with use_backend(backend):
        assert (merge_partials(o, m, torch.zeros(2, 3)) == 0).all()


def test_mismatched_partials_are_rejected():
    o = torch.randn(2, 3, 64)
    with pytest.raises(InputError, match=r"'l' has shape \[2, 2\]; \[2, 3\]"):
        merge_partials(o, torch.zeros(2, 3), torch.zeros(2, 2))
    with pytest.raises(InputError, match="'o' has dtype bfloat16; float32"):
        merge_partials(o.bfloat16(), torch.zeros(2, 3), torch.zeros(2, 3))


@pytest.mark.parametrize(("kilobytes", "stages"), [(227, 3), (163, 3), (99, 2)])
def test_tiles_fit_the_shared_memory_of_the_gpu(kilobytes: int, stages: int, monkeypatch: pytest.MonkeyPatch):
    flash_paged = pytest.importorskip("auraflux.ops.attention.cuda.flash_paged")
    options: list[dict[str, Any]] = []
    monkeypatch.setattr(flash_paged, "launch", lambda kernel, grid: lambda *args, **given: options.append(given))
    monkeypatch.setattr(flash_paged, "launch_merge", lambda *args: None)
    monkeypatch.setattr(flash_paged, "shared_nbytes", lambda device: kilobytes << 10)
    args = queries([4096], [64], (32, 8), 128, page=64, dtype=torch.float16)
    pages = args["pages"]
    flash_paged.attend(args["q"], None, (pages.k, pages.v), pages, args["starts"], args["scale"], torch.empty_like(args["q"]))
    assert options[0]["num_stages"] == stages
