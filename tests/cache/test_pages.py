"""Page ownership: sharing, copy on write, release."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auraflux.cache import AttentionShape, Cache, CacheSettings
from auraflux.cache.page_pool import PagePool, reserve
from auraflux.cache.pages import LayerGroup
from auraflux.errors import CacheFull, ContextError, InputError
from auraflux.ops import use_backend
from tests.cache.toy import FULL, RECURRENT, TOYS, WINDOW, Toy


@pytest.fixture(autouse=True)
def _reference():
    with use_backend("reference"):
        yield


def group_of(span: int | None = None, pages: int = 16, size: int = 4, rollback_tokens: int = 0) -> LayerGroup:
    group = LayerGroup(span, pages, size, rollback_tokens, torch.device("cpu"))
    group.zeros(size, 2, dtype=torch.float32)
    return group


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_reserved_memory_is_zero_and_aligned(dtype):
    made = reserve(3, 5, 7, dtype=dtype, device=torch.device("cpu"))
    assert (made.shape, made.dtype, made.data_ptr() % 64) == ((3, 5, 7), dtype, 0)
    assert made.is_contiguous()
    assert not made.any()


def test_memory_that_cannot_be_reserved_is_a_memory_error():
    with pytest.raises(MemoryError):
        reserve(1 << 50, dtype=torch.float32, device=torch.device("cpu"))


def test_a_page_is_free_when_its_last_owner_releases_it():
    pool = PagePool(3)
    page = pool.allocate()
    pool.share([page])
    pool.release([page])
    assert (pool.used, pool.owners(page)) == (1, 1)
    pool.release([page])
    assert (pool.used, pool.free) == (0, 3)


def test_a_fork_shares_every_page_and_copies_only_the_one_it_writes_to():
    group = group_of()
    table = group.open()
    table.extend(0, 10)
    group.stores[0][table.pages[-1]] = 7.0
    other = table.fork()
    assert [group.pool.owners(page) for page in table.pages] == [2, 2, 2]
    assert group.pool.used == 3
    assert other.pages_needed(10, 1) == 1
    other.extend(10, 1)
    assert [group.pool.owners(page) for page in table.pages] == [2, 2, 1]
    assert other.pages[:2] == table.pages[:2]
    assert other.pages[2] != table.pages[2]
    assert torch.equal(group.stores[0][other.pages[2]], group.stores[0][table.pages[2]])
    # the other table is the only owner of its page again
    assert table.pages_needed(10, 1) == 0


def test_a_full_shared_page_is_not_copied():
    group = group_of()
    table = group.open()
    table.extend(0, 8)
    other = table.fork()
    assert other.pages_needed(8, 1) == 1
    other.extend(8, 1)
    assert other.pages[:2] == table.pages


def test_the_last_owner_writes_to_a_shared_page_in_place():
    toy = Toy([FULL])
    cache = toy.cache(context=8, tokens=16)
    a = cache.open()
    toy.add(cache, a, [1] * 6)
    b, c = a.fork(), a.fork()
    toy.feed(cache, cache.batch([a, b, c]), [[1], [2], [3]])
    assert cache.group(None).free == 0
    assert len({s.group_states[cache.group(None)].pages[-1] for s in (a, b, c)}) == 3


def test_truncating_into_a_shared_page_copies_it_at_the_next_append():
    group = group_of()
    table = group.open()
    table.extend(0, 8)
    other = table.fork()
    other.truncate(6)
    assert other.pages == table.pages
    other.extend(6, 1)
    assert other.pages[1] != table.pages[1]


@pytest.mark.parametrize("rollback_tokens", [0, 3])
@pytest.mark.parametrize("size", [1, 4, 5])
def test_a_window_retains_its_span_and_the_rollback_tokens(size, rollback_tokens):
    group = group_of(span=6, size=size, rollback_tokens=rollback_tokens, pages=40)
    table = group.open()
    for length in range(60):
        table.release_expired(length)
        table.extend(length, 1)
        oldest = max(0, length - 5 - rollback_tokens)
        assert table.first == oldest // size
        assert table.first + len(table.pages) == length // size + 1
    assert group.pool.used <= (6 + rollback_tokens) // size + 2


def test_expired_pages_are_reused():
    group = group_of(span=4, pages=3)
    table = group.open()
    seen = set()
    for length in range(40):
        table.release_expired(length)
        table.extend(length, 1)
        seen |= set(table.pages)
    assert seen == {0, 1}


def test_a_window_knows_where_it_can_be_truncated():
    group = group_of(span=6, size=4, rollback_tokens=2)
    table = group.open()
    for length in range(30):
        table.release_expired(length)
        table.extend(length, 1)
    # the last step retained what a query at 29 - 2 attends to: from 22 on, so the pages from 20 on
    assert [length for length in range(31) if table.can_truncate(length)] == [*range(25, 31)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["extend", "truncate", "fork", "close"]), st.integers(0, 30)), max_size=30))
def test_reference_counts_match_owners(steps):
    group = group_of(pages=400, size=3)
    tables = [(group.open(), 0)]
    for action, number in steps:
        table, length = tables.pop(number % len(tables)) if tables else (group.open(), 0)
        if action == "extend":
            table.extend(length, number)
            tables.append((table, length + number))
        elif action == "truncate":
            table.truncate(length - min(length, number))
            tables.append((table, length - min(length, number)))
        elif action == "fork":
            tables += [(table, length), (table.fork(), length)]
        else:
            table.close()
        owned = [page for table, _ in tables for page in table.pages]
        assert [group.pool.owners(page) for page in range(400)] == [owned.count(page) for page in range(400)]
        assert group.pool.used == len(set(owned))
        assert all(len(table.pages) == -(-length // 3) for table, length in tables)


def test_a_shared_prefix_is_stored_once():
    toy = TOYS["k4v4"]
    cache = toy.cache()
    sequence = cache.open()
    toy.add(cache, sequence, [1] * 16)
    before = cache.nbytes
    forks = [sequence.fork() for _ in range(5)]
    assert cache.nbytes == before
    assert sum(fork.nbytes for fork in forks) == 5 * sequence.nbytes == 5 * before
    sequence.close()
    assert cache.nbytes == before


def test_a_context_overflow_says_how_to_raise_the_limit():
    toy = Toy([FULL])
    cache = toy.cache(context=10)
    sequence = cache.open()
    toy.add(cache, sequence, [1] * 10)
    with pytest.raises(ContextError, match=r"10 tokens cannot take 1 more: the context is limited to 10.*context=11"):
        toy.add(cache, sequence, [1])
    assert sequence.length == 10


def test_a_full_pool_changes_nothing_and_says_what_to_do():
    toy = Toy([FULL, WINDOW])
    cache = toy.cache(context=20, sequences=2, tokens=24)
    a, b = cache.open(), cache.open()
    toy.add(cache, a, [1] * 16)
    with pytest.raises(CacheFull, match=r"12 new tokens need 3 pages of 4 tokens.*and 2 are free.*'sequences' or 'tokens'"):
        toy.add(cache, b, [1] * 12)
    assert (a.length, b.length, b.nbytes) == (16, 0, 0)
    a.close()
    assert toy.add(cache, b, [1] * 12).shape[0] == 12


def test_a_full_pool_grows():
    toy = Toy([FULL, WINDOW])
    cache = toy.cache(context=40, sequences=2, tokens=24)
    first, other = [1, 2] * 8, [3, 4, 5] * 6
    a, b = cache.open(), cache.open()
    before = toy.add(cache, a, first)
    assert cache.grow(cache.page_nbytes - 1) is False
    assert cache.grow(4 * cache.page_nbytes) is True
    assert cache.tokens == 40
    # what was stored is still there, and the new pages are usable
    torch.testing.assert_close(torch.cat([before, toy.add(cache, a, [6])]), toy.fresh([*first, 6], context=40))
    torch.testing.assert_close(toy.add(cache, b, other), toy.fresh(other, context=40))
    with pytest.raises(CacheFull):
        toy.add(cache, b, [1] * 12)


def test_a_window_pool_is_small_and_enough():
    toy = Toy([WINDOW])
    cache = toy.cache(context=4096, sequences=2, chunk=8)
    a, b = cache.open(), cache.open()
    assert cache.group(7).pool.count < 24
    batch = cache.batch([a, b])
    for _ in range(40):
        toy.feed(cache, batch, [[1] * 8, [2] * 8])
    assert a.length == b.length == 320


def test_checkpoints_give_way_to_tokens():
    toy = Toy([WINDOW])
    cache = toy.cache(sequences=1, chunk=8)
    sequence = cache.open()
    for _ in range(7):
        toy.add(cache, sequence, [1] * 8)
        sequence.checkpoint()
    assert 0 < len(sequence.checkpoints) < 7
    assert sequence.checkpoints[-1] == 56


def test_states_run_out_before_pages_are_allocated():
    toy = Toy([RECURRENT, FULL])
    cache = toy.cache(sequences=1)
    sequence = cache.open()
    toy.add(cache, sequence, [1] * 5)
    with pytest.raises(CacheFull, match="all 1 recurrent states are in use"):
        sequence.fork()
    assert cache.group(None).pool.owners(0) == 1


def test_bad_calls_are_refused():
    toy = Toy([FULL])
    cache = toy.cache(context=20)
    a = cache.open()
    with pytest.raises(InputError, match="each only once"):
        cache.batch([a, a])
    with pytest.raises(InputError, match="one count of at least 0 is needed for each"):
        cache.batch([a]).extend([1, 2])
    with pytest.raises(InputError, match="of 0 tokens cannot be truncated to 3"):
        a.truncate(3)
    snapshot = a.snapshot()
    a.close()
    a.close()
    with pytest.raises(InputError, match="closed"):
        cache.batch([a]).extend([1])
    with pytest.raises(InputError, match="does not fit a cache of"):
        TOYS["k4v4"].cache().restore(snapshot)
    long = toy.cache(context=40)
    b = long.open()
    toy.add(long, b, [1] * 30)
    with pytest.raises(ContextError, match=r"snapshot of 30 tokens.*context=30"):
        cache.restore(b.snapshot())


def test_a_snapshot_without_room_allocates_nothing():
    toy = Toy([FULL])
    cache = toy.cache(context=20, tokens=20)
    sequence = cache.open()
    toy.add(cache, sequence, [1] * 12)
    with pytest.raises(CacheFull, match="a snapshot needs 3 pages"):
        cache.restore(sequence.snapshot())
    assert cache.group(None).pool.used == 3


@pytest.mark.parametrize("bits", ["k8v4", "k4v4", "k4v2", "k3v3", "k6v2"])
def test_bytes_of_a_token_follow_the_formula(bits):
    key, value = int(bits[1]), int(bits[3])
    cache = Cache([AttentionShape(8, 128)] * 3, CacheSettings(bits, sink_tokens=0, recent_window=0), context=64, page=16)
    assert cache.token_nbytes == 3 * 8 * (128 * key // 8 + 4 + 128 * value // 8 + 4)
    sequence = cache.open()
    cache.batch([sequence]).extend([17])
    assert sequence.nbytes == cache.nbytes == 32 * cache.token_nbytes


@pytest.mark.parametrize("shape", [AttentionShape(1, 16, window=8), AttentionShape(1, 16)])
def test_expired_pages_of_one_sequence_serve_the_next(shape):
    """Sequences are prefilled one by one: the next needs the pages that windows hold past their span after a step."""
    settings = CacheSettings("k4v4", recent_window=4)
    cache = Cache([shape], settings, context=512, sequences=3, page=4, chunk=256)
    sequences = [cache.open() for _ in range(3)]
    for sequence in sequences:
        cache.batch([sequence]).extend([256])
    cache.batch(sequences).extend([1] * 3)
    assert [sequence.length for sequence in sequences] == [257] * 3


def test_k4v4_is_much_smaller_than_bf16():
    full = Cache([AttentionShape(8, 128)], CacheSettings("none"), context=64, dtype=torch.bfloat16)
    assert full.token_nbytes == 8 * 2 * 128 * 2
    quantized = Cache([AttentionShape(8, 128)], CacheSettings("k4v4"), context=64)
    assert full.token_nbytes / quantized.token_nbytes >= 3.7


@pytest.mark.parametrize("context", [1, 9, 12, 63])
def test_every_sequence_has_room_for_its_context(context):
    cache = Toy([FULL]).cache(context=context, sequences=5)
    sequences = [cache.open() for _ in range(5)]
    cache.batch(sequences).extend([context] * 5)
    assert [sequence.length for sequence in sequences] == [context] * 5
