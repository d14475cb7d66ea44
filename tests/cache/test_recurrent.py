"""Recurrent states: checkpoints, the cost of truncating, and their size."""

import pytest
import torch

from auraflux.cache import Cache, CacheSettings, KVSequence
from auraflux.errors import SettingsError
from auraflux.ops import use_backend
from tests.cache.toy import FULL, RECURRENT, VOCABULARY, WINDOW, Toy

STATE_NBYTES = 4 * (3 * 12 + 2 * 4 * 6)


@pytest.fixture(autouse=True)
def _reference():
    with use_backend("reference"):
        yield


def toy_of(**settings) -> Toy:
    return Toy([RECURRENT, FULL], CacheSettings("none", **settings))


def run(toy: Toy, steps: list[int], **options):
    cache = toy.cache(**options)
    sequence = cache.open()
    for new in steps:
        toy.add(cache, sequence, [(sequence.length + i) % VOCABULARY for i in range(new)])
    return cache, sequence


def test_truncating_rewinds_to_the_last_checkpoint_before():
    cache, sequence = run(toy_of(), [10])
    sequence.checkpoint()
    toy = toy_of()
    toy.add(cache, sequence, [10 % VOCABULARY, 0, 1])
    assert sequence.truncate(12) == 2
    assert (sequence.length, sequence.checkpoints) == (10, [10])
    out = toy.add(cache, sequence, [10, 0, 5])
    torch.testing.assert_close(out[-1], toy.fresh([*range(10), 10, 0, 5])[-1], rtol=1e-4, atol=1e-5)


def test_a_checkpoint_at_the_same_position_costs_nothing():
    _, sequence = run(toy_of(), [10])
    sequence.checkpoint()
    assert sequence.truncate(10) == 0


def test_without_a_checkpoint_all_tokens_are_recomputed():
    cache, sequence = run(toy_of(), [10, 3])
    assert sequence.truncate(12) == 12
    assert sequence.length == 0
    assert cache.layers[0].delta.abs().max() == 0
    assert cache.group(None).pool.used == 0


def test_the_stride_makes_checkpoints_at_the_ends_of_steps():
    _, sequence = run(toy_of(checkpoint_stride=4), [1] * 13)
    assert sequence.checkpoints == [4, 8, 12]
    _, sequence = run(toy_of(checkpoint_stride=4), [3, 3, 9, 1, 1])
    # 6 and 15 are the first ends of steps at or past a multiple, 16 is one
    assert sequence.checkpoints == [6, 15, 16]
    assert sequence.truncate(14) == 8


def test_checkpoints_past_the_truncated_length_are_dropped():
    cache, sequence = run(toy_of(checkpoint_stride=4), [1] * 13)
    assert sequence.truncate(9) == 1
    assert sequence.checkpoints == [4, 8]
    assert cache.checkpoints.nbytes == 2 * STATE_NBYTES


def test_the_oldest_are_dropped_within_the_budget():
    cache, sequence = run(toy_of(checkpoint_stride=2, checkpoint_nbytes=3 * STATE_NBYTES + 5), [1] * 13)
    assert sequence.checkpoints == [8, 10, 12]
    assert cache.checkpoints.nbytes == 3 * STATE_NBYTES
    assert sequence.truncate(7) == 7


def test_the_budget_is_for_all_sequences_and_does_not_thrash():
    toy = toy_of(checkpoint_stride=4, checkpoint_nbytes=STATE_NBYTES)
    cache = toy.cache()
    a, b = cache.open(), cache.open()
    for _ in range(6):
        toy.feed(cache, cache.batch([a, b]), [[1], [2]])
    assert (a.checkpoints, b.checkpoints) == ([], [4])


def test_no_budget_no_checkpoints():
    cache, sequence = run(toy_of(checkpoint_stride=1, checkpoint_nbytes=0), [1] * 5)
    sequence.checkpoint()
    assert sequence.checkpoints == []
    assert cache.checkpoints.nbytes == 0


def test_a_budget_smaller_than_a_state_is_refused():
    with pytest.raises(SettingsError, match=rf"checkpoint_nbytes=5 holds no checkpoint: one takes {STATE_NBYTES} bytes"):
        toy_of(checkpoint_nbytes=5).cache()


def test_a_fork_has_the_checkpoints_too():
    cache, sequence = run(toy_of(checkpoint_stride=4), [1] * 9)
    other = sequence.fork()
    sequence.close()
    assert other.checkpoints == [4, 8]
    assert cache.checkpoints.nbytes == 2 * STATE_NBYTES
    assert other.truncate(6) == 2
    other.close()
    assert cache.nbytes == 0


def test_bytes_are_those_of_states_pages_and_checkpoints():
    cache, sequence = run(toy_of(), [6])
    pages = 2 * 4 * cache.token_nbytes
    assert sequence.nbytes == cache.nbytes == STATE_NBYTES + pages
    sequence.checkpoint()
    assert cache.nbytes == 2 * STATE_NBYTES + pages


def test_a_reused_slot_starts_empty():
    toy = toy_of()
    cache, sequence = run(toy, [9], sequences=1)
    sequence.close()
    torch.testing.assert_close(toy.add(cache, cache.open(), [5, 6]), toy.fresh([5, 6]))


def states(cache: Cache, sequence: KVSequence) -> list[torch.Tensor]:
    slot = sequence.group_states[cache.states].slot
    return [store[slot].clone() for store in cache.states.stores]


@pytest.mark.parametrize("padding", [0, 1, 7])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("before", [0, 1, 6])
def test_padding_tokens_do_not_change_a_state(before: int, tokens: int, padding: int):
    toy, new = toy_of(), [(3 * i + 1) % VOCABULARY for i in range(tokens)]
    found = []
    for padded in (True, False):
        cache, sequence = run(toy, [before] if before else [])
        out = toy.add_padded(cache, sequence, new, padding) if padded else toy.add(cache, sequence, new)
        assert sequence.length == before + tokens
        after = states(cache, sequence)
        found.append([out, *after, toy.add(cache, sequence, [2]), toy.add(cache, sequence, [3, 4, 5])])
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-6)
    # states are bit-identical
    assert all(torch.equal(*pair) for pair in zip(found[0][1:3], found[1][1:3], strict=True))


def test_padded_steps_mix_with_others():
    toy, tokens = toy_of(checkpoint_stride=4), [(5 * i + 2) % VOCABULARY for i in range(24)]
    cache = toy.cache()
    other, sequence = cache.open(), cache.open()
    outs = [toy.add_padded(cache, sequence, tokens[:2], 6), toy.add_padded(cache, sequence, tokens[2:11], 3)]
    sequence.checkpoint()
    # a step of two sequences of different lengths
    outs.append(toy.feed(cache, cache.batch([other, sequence]), [tokens[:5], tokens[11:13]])[1])
    assert (sequence.length, sequence.checkpoints) == (13, [11])
    assert sequence.truncate(12) == 1
    outs[2:] = [toy.add_padded(cache, sequence, tokens[11:20], 7), toy.add(cache, sequence, tokens[20:])]
    torch.testing.assert_close(torch.cat(outs), toy.fresh(tokens), rtol=1e-4, atol=1e-5)
    assert sequence.checkpoints == [11, 20]


def test_a_window_rewinds_to_a_checkpoint_whose_pages_it_released():
    toy = Toy([WINDOW, FULL])
    cache, sequence = run(toy, [9], rollback_tokens=0)
    sequence.checkpoint()
    for i in range(20):
        toy.add(cache, sequence, [i % 5])
    assert sequence.truncate(11) == 2
    out = toy.add(cache, sequence, [9, 10, 3])
    torch.testing.assert_close(out[-1], toy.fresh([*range(9), 9, 10, 3])[-1], rtol=1e-4, atol=1e-5)


def test_a_window_without_a_checkpoint_is_recomputed():
    cache, sequence = run(Toy([WINDOW, FULL]), [5] * 6)
    # steps of 5 retain what a query at 25 - 3 attends to, from 16 on
    assert sequence.truncate(22) == 0
    assert sequence.truncate(21) == 21
    assert (sequence.length, cache.nbytes) == (0, 0)
