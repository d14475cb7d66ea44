"""Replays of recorded launches give the same results for the current contents of the buffers."""

import importlib
import threading
from array import array

import pytest
import torch

from auraflux.errors import BackendError, InputError
from auraflux.ops import append_kv, attention, encode, linear, rms_norm, rotate, swiglu
from auraflux.ops.attention._inputs import starts_of
from auraflux.ops.attention.cases import kv_pages
from auraflux.ops.simd.jit import workspace
from auraflux.ops.simd.replay.record import SCRATCH_NBYTES, record
from auraflux.quant import quantize

WIDTH = 96


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, WIDTH)


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(WIDTH)


def test_a_replay_reads_the_current_buffers(x, weight):
    with record() as made:
        normed = rms_norm(x, weight, 1e-6)
        out = swiglu(normed, x)
    assert made.rejected is None
    torch.testing.assert_close(out, swiglu(rms_norm(x, weight, 1e-6), x))
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        made.replay()
        torch.testing.assert_close(out, swiglu(rms_norm(x, weight, 1e-6), x), rtol=0, atol=0)


def test_recording_does_not_change_results(x, weight):
    expected = encode(rms_norm(x, weight, 1e-6), 4, 7)
    with record():
        found = encode(rms_norm(x, weight, 1e-6), 4, 7)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_a_replay_outlives_calls_with_more_tokens(monkeypatch: pytest.MonkeyPatch):
    products = importlib.import_module("auraflux.ops.linear.cpu.products")
    monkeypatch.setattr(products, "_counting", [array("q", range(64))])
    weight, x = quantize(torch.randn(64, 128), 4, 64), torch.randn(9, 128)
    with record() as made:
        out = linear(x[:1], weight)
    wanted = out.clone()
    linear(torch.randn(200, 128), weight)
    # would reuse memory that was freed
    others = [array("q", [5] * 64) for _ in range(4096)]
    made.replay()
    assert torch.equal(out, wanted)
    del others


def test_a_sequence_grows_while_its_step_is_replayed():
    """A replay reads lengths from memory and plans the work again, from a few positions to many with split-K."""
    pages, starts = kv_pages([700], 2, 32), starts_of([1])
    q, k, v = torch.randn(1, 4, 32), torch.randn(1, 2, 32), torch.randn(1, 2, 32)
    pages.lengths.fill_(3)

    def step() -> torch.Tensor:
        append_kv(k, v, pages, starts)
        return attention(q, pages, starts, 0.2)

    with record() as made:
        out = step()
    assert made.rejected is None
    for length in (4, 63, 64, 65, 300, 700):
        pages.lengths.fill_(length)
        for tensor in (q, k, v):
            tensor.copy_(torch.randn_like(tensor))
        made.replay()
        found = out.clone()
        torch.testing.assert_close(found, step())


@pytest.mark.parametrize("operate", [lambda y: y * 2, lambda y: y + y, lambda y: y.exp(), lambda y: y.mul_(2)])
def test_torch_between_the_kernels_rejects_a_recording(x, weight, operate):
    with record() as made:
        operate(rms_norm(x, weight, 1e-6))
    assert made.rejected is not None
    assert made.rejected.startswith("torch's ")
    assert made.rejected.endswith(" runs between the kernels")


@pytest.mark.parametrize(
    "read", [lambda y: y.tolist(), lambda y: y.sum().item(), lambda y: bool((y > 0).all()), lambda y: y.numpy()]
)
def test_a_value_that_python_reads_rejects_a_recording(x, weight, read):
    normed = rms_norm(x, weight, 1e-6)
    with record() as made:
        read(normed)
    assert made.rejected is not None


def test_the_first_reason_is_reported(x):
    with record() as made:
        x.exp()
        x.tolist()
    assert made.rejected == "torch's exp runs between the kernels"


def test_views_and_empty_tensors_are_harmless(x, weight):
    with record() as made:
        halves = rms_norm(x, weight, 1e-6).view(5, 2, WIDTH // 2).transpose(0, 1)[0].unsqueeze(0)
        torch.empty(3, 4)
    assert made.rejected is None
    x.neg_()
    made.replay()
    torch.testing.assert_close(halves[0], rms_norm(x, weight, 1e-6)[:, : WIDTH // 2])


def test_values_read_by_checks_do_not_reject(x):
    """Checks read values only to refuse bad ones."""
    pages = kv_pages([9], 2, 32)
    with record() as made:
        append_kv(torch.empty(1, 2, 32), torch.empty(1, 2, 32), pages, starts_of([1]))
    assert made.rejected is None


def test_zeros_sums_and_copies_are_replayed(x, weight):
    with record() as made:
        total = torch.zeros(5, WIDTH)
        total.add_(rms_norm(x, weight, 1e-6))
        total.add_(x)
        total.add_(weight)
        cleared, half = torch.empty(7).zero_(), total[:, :40].clone()
    assert made.rejected is None
    x.copy_(torch.randn_like(x))
    total.fill_(torch.nan)
    cleared.fill_(1.0)
    made.replay()
    torch.testing.assert_close(total, rms_norm(x, weight, 1e-6) + x + weight)
    assert torch.equal(half, total[:, :40])
    assert not cleared.any()


@pytest.mark.parametrize(
    "add",
    [
        lambda a, b: a.add_(b, alpha=2),
        lambda a, b: a.add_(1.0),
        lambda a, b: a.add_(b[:, :1]),
        lambda a, b: a.add_(b.T[:5, :5].T[:5, :1]),
        lambda a, b: a.double().add_(b),
    ],
    ids=["scaled", "number", "broadcast", "strided", "other-dtype"],
)
def test_other_sums_reject(x, add):
    total = torch.zeros(5, WIDTH)
    with record() as made:
        add(total, x)
    assert made.rejected is not None


def test_strided_zeros_reject(x):
    with record() as made:
        x[:, ::2].zero_()
    assert made.rejected == "torch's zero_ runs between the kernels"


def test_scratch_memory_is_not_shared_with_other_calls(x):
    before = workspace(64)
    with record() as made:
        small, again = workspace(64), workspace(128)
        rotated = rotate(x, 7)
        large = workspace(SCRATCH_NBYTES + 1)
        back = rotate(rotated, 7, inverse=True)
    assert small == again
    assert before not in (small, large)
    assert large != small
    assert large % 64 == small % 64 == 0
    # the thread's scratch memory is separate: using it does not affect a replay
    rotate(torch.randn(64, WIDTH), 7)
    x.copy_(torch.randn_like(x))
    made.replay()
    torch.testing.assert_close(back, x)
    torch.testing.assert_close(rotated, rotate(x, 7))


def test_tensors_allocated_during_a_recording_are_retained(x):
    with record() as made:
        out = rms_norm(x, torch.tensor([2.0] * WIDTH), 1e-6)
    others = [torch.full((WIDTH,), 5.0) for _ in range(50)]
    made.replay()
    torch.testing.assert_close(out, rms_norm(x, torch.full((WIDTH,), 2.0), 1e-6))
    assert others


def test_other_threads_are_not_recorded(x, weight):
    theirs = torch.randn(5, WIDTH)
    found: list[torch.Tensor] = []

    def elsewhere() -> None:
        found.append(rms_norm(theirs, weight, 1e-6) * 2)

    with record() as made:
        mine = rms_norm(x, weight, 1e-6)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert made.rejected is None
    found[0].fill_(3.0)
    x.neg_()
    made.replay()
    assert (found[0] == 3.0).all()
    torch.testing.assert_close(mine, rms_norm(x, weight, 1e-6))


def test_recordings_do_not_nest(x, weight):
    with record() as made:
        with pytest.raises(BackendError, match="already recording"), record():
            pass
        out = rms_norm(x, weight, 1e-6)
    x.neg_()
    made.replay()
    torch.testing.assert_close(out, rms_norm(x, weight, 1e-6))


def test_a_recording_that_failed_leaves_nothing_behind(x, weight):
    with pytest.raises(InputError), record():
        rms_norm(x, weight[:-1], 1e-6)
    with record() as made:
        out = rms_norm(x, weight, 1e-6)
    x.neg_()
    made.replay()
    torch.testing.assert_close(out, rms_norm(x, weight, 1e-6))
