"""Memory of large CPU tensors that are gone serves the next ones."""

import torch

from auraflux.ops.simd import jit
from auraflux.ops.simd.jit import REUSED_FROM, ReusedMemory, empty
from auraflux.ops.simd.replay.record import record

FLOATS = REUSED_FROM // 4


def test_memory_is_reused_when_the_last_view_is_gone(monkeypatch):
    monkeypatch.setattr(jit, "reused_memory", ReusedMemory())
    first = empty(2, FLOATS)
    assert (first.shape, first.dtype, first.is_contiguous()) == ((2, FLOATS), torch.float32, True)
    address, view = first.data_ptr(), first[1]
    view.fill_(3)
    del first
    other = empty(2, FLOATS)
    assert other.data_ptr() != address
    assert bool((view == 3).all())
    del view
    assert empty(2 * FLOATS).data_ptr() == address


def test_much_smaller_tensors_leave_memory_to_large_ones(monkeypatch):
    memory = ReusedMemory()
    monkeypatch.setattr(jit, "reused_memory", memory)
    del_me = empty(8 * FLOATS)
    address = del_me.data_ptr()
    del del_me
    assert empty(FLOATS).data_ptr() != address
    assert empty(7 * FLOATS).data_ptr() == address


def test_free_memory_is_bounded(monkeypatch):
    memory = ReusedMemory()
    monkeypatch.setattr(jit, "reused_memory", memory)
    monkeypatch.setattr(jit, "MOST_FREE_NBYTES", 3 * REUSED_FROM)
    some = [empty(FLOATS) for _ in range(5)]
    some.clear()
    assert sum(each.nbytes for each in memory._free) == 3 * REUSED_FROM


def test_recordings_observe_torch(monkeypatch):
    class Refusing(ReusedMemory):
        def take(self, nbytes):
            raise AssertionError("memory was taken while recording")

    monkeypatch.setattr(jit, "reused_memory", Refusing())
    with record():
        assert empty(FLOATS).shape == (FLOATS,)
