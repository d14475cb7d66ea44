"""Pages: who owns them, when they are copied, when they come back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auraflux.cache import AttentionShape, Cache, CacheSettings
from auraflux.cache.pages import ALIGNMENT, LayerGroup, PagePool, reserve
from auraflux.errors import CacheFull, ContextError, InputError
from auraflux.ops import use_backend
from tests.cache.toy import FULL, RECURRENT, TOYS, WINDOW, Toy


@pytest.fixture(autouse=True)
def _reference():
    with use_backend("reference"):
        yield


def group_of(span: int | None = None, pages: int = 16, size: int = 4, spare: int = 0) -> LayerGroup:
    group = LayerGroup(span, pages, size, spare, torch.device("cpu"))
    group.zeros(size, 2, dtype=torch.float32)
    return group


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_reserved_memory_is_zero_and_aligned(dtype):
    made = reserve(3, 5, 7, dtype=dtype, device=torch.device("cpu"))
    assert (made.shape, made.dtype, made.data_ptr() % ALIGNMENT) == ((3, 5, 7), dtype, 0)
    assert made.is_contiguous()
    assert not made.any()


def test_a_page_is_free_when_its_last_owner_lets_go():
    pool = PagePool(3)
    page = pool.take()
    pool.share([page])
    pool.release([page])
    assert (pool.used, pool.owners(page)) == (1, 1)
    pool.release([page])
    assert (pool.used, pool.free) == (0, 3)


def test_a_fork_shares_every_page_and_copies_only_the_one_it_writes_to():
    group = group_of()
    row = group.open()
    row.extend(0, 10)
    group.stores[0][row.pages[-1]] = 7.0
    other = row.fork()
    assert [group.pool.owners(page) for page in row.pages] == [2, 2, 2]
    assert group.pool.used == 3
    assert other.needs(10, 1) == 1
    other.extend(10, 1)
    assert [group.pool.owners(page) for page in row.pages] == [2, 2, 1]
    assert other.pages[:2] == row.pages[:2]
    assert other.pages[2] != row.pages[2]
    assert torch.equal(group.stores[0][other.pages[2]], group.stores[0][row.pages[2]])
    # the other owner is alone with its page again
    assert row.needs(10, 1) == 0


def test_a_full_shared_page_is_not_copied():
    group = group_of()
    row = group.open()
    row.extend(0, 8)
    other = row.fork()
    assert other.needs(8, 1) == 1
    other.extend(8, 1)
    assert other.pages[:2] == row.pages


def test_of_those_that_write_to_a_shared_page_the_last_has_it_for_itself():
    toy = Toy([FULL])
    cache = toy.cache(context=8, tokens=16)
    a = cache.open()
    toy.add(cache, a, [1] * 6)
    b, c = a.fork(), a.fork()
    toy.feed(cache, cache.batch([a, b, c]), [[1], [2], [3]])
    assert cache.group(None).free == 0
    assert len({row.pages[-1] for row in (s.rows[cache.group(None)] for s in (a, b, c))}) == 3


def test_truncating_into_a_shared_page_copies_it_at_the_next_append():
    group = group_of()
    row = group.open()
    row.extend(0, 8)
    other = row.fork()
    other.truncate(6)
    assert other.pages == row.pages
    other.extend(6, 1)
    assert other.pages[1] != row.pages[1]


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("size", [1, 4, 5])
def test_a_window_holds_what_the_next_query_sees_and_little_more(size, spare):
    group = group_of(span=6, size=size, spare=spare, pages=40)
    row = group.open()
    for length in range(60):
        row.settle(length)
        row.extend(length, 1)
        oldest = max(0, length - 5 - spare)
        assert row.first == oldest // size
        assert row.first + len(row.pages) == length // size + 1
    assert group.pool.used <= (6 + spare) // size + 2


def test_pages_that_fell_out_are_used_again():
    group = group_of(span=4, pages=3)
    row = group.open()
    seen = set()
    for length in range(40):
        row.settle(length)
        row.extend(length, 1)
        seen |= set(row.pages)
    assert seen == {0, 1}


def test_a_window_knows_how_far_back_it_reaches():
    group = group_of(span=6, size=4, spare=2)
    row = group.open()
    for length in range(30):
        row.settle(length)
        row.extend(length, 1)
    # the last step kept what a query at 29 - 2 sees: from 22 on, so the pages from 20 on
    assert [length for length in range(31) if row.reaches(length)] == [*range(25, 31)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["extend", "truncate", "fork", "close"]), st.integers(0, 30)), max_size=30))
def test_owners_are_always_counted_right(steps):
    group = group_of(pages=400, size=3)
    rows = [(group.open(), 0)]
    for action, number in steps:
        row, length = rows.pop(number % len(rows)) if rows else (group.open(), 0)
        if action == "extend":
            row.extend(length, number)
            rows.append((row, length + number))
        elif action == "truncate":
            row.truncate(length - min(length, number))
            rows.append((row, length - min(length, number)))
        elif action == "fork":
            rows += [(row, length), (row.fork(), length)]
        else:
            row.close()
        owned = [page for row, _ in rows for page in row.pages]
        assert [group.pool.owners(page) for page in range(400)] == [owned.count(page) for page in range(400)]
        assert group.pool.used == len(set(owned))
        assert all(len(row.pages) == -(-length // 3) for row, length in rows)


def test_a_prefix_is_held_once():
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


def test_a_context_that_overflows_says_how_to_raise_the_limit():
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


def test_states_run_out_before_anything_is_taken():
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
    with pytest.raises(InputError, match="none twice"):
        cache.batch([a, a])
    with pytest.raises(InputError, match="one number for each"):
        cache.batch([a]).extend([1, 2])
    with pytest.raises(InputError, match="of 0 tokens cannot be cut to 3"):
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


def test_a_snapshot_that_finds_no_room_takes_nothing():
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
    cache = Cache([AttentionShape(8, 128)] * 3, CacheSettings(bits, first=0, newest=0), context=64, page=16)
    assert cache.token_nbytes == 3 * 8 * (128 * key // 8 + 4 + 128 * value // 8 + 4)
    sequence = cache.open()
    cache.batch([sequence]).extend([17])
    assert sequence.nbytes == cache.nbytes == 32 * cache.token_nbytes


@pytest.mark.parametrize("shape", [AttentionShape(1, 16, window=8), AttentionShape(1, 16)])
def test_what_one_text_no_longer_sees_has_room_for_the_next(shape):
    """Texts are read one after the other: what windows hold of a step beyond themselves is wanted by the next."""
    settings = CacheSettings("k4v4", newest=4)
    cache = Cache([shape], settings, context=512, sequences=3, page=4, chunk=256)
    sequences = [cache.open() for _ in range(3)]
    for sequence in sequences:
        cache.batch([sequence]).extend([256])
    cache.batch(sequences).extend([1] * 3)
    assert [sequence.length for sequence in sequences] == [257] * 3


def test_k4v4_is_much_smaller_than_bf16():
    plain = Cache([AttentionShape(8, 128)], CacheSettings("none"), context=64, dtype=torch.bfloat16)
    assert plain.token_nbytes == 8 * 2 * 128 * 2
    coded = Cache([AttentionShape(8, 128)], CacheSettings("k4v4"), context=64)
    assert plain.token_nbytes / coded.token_nbytes >= 3.7


@pytest.mark.parametrize("context", [1, 9, 12, 63])
def test_every_sequence_has_room_for_its_context(context):
    cache = Toy([FULL]).cache(context=context, sequences=5)
    sequences = [cache.open() for _ in range(5)]
    cache.batch(sequences).extend([context] * 5)
    assert [sequence.length for sequence in sequences] == [context] * 5
