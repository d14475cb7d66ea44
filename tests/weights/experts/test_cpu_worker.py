"""Experts computed by CPU threads for a simulated device: parity with the reference, and the protocol of the mailbox."""

import random
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from auraflux.errors import FormatError, SettingsError
from auraflux.ops.linear.reference import dense
from auraflux.ops.moe.cpu.row_form import LANES
from auraflux.ops.moe.experts import Experts, blob_of
from auraflux.ops.moe.reference import expert_parts
from auraflux.quant import QTensor, affine
from auraflux.weights.experts.cpu_worker import CpuExpertWorker, worker
from auraflux.weights.experts.cpu_worker.mailbox import PAGE_NBYTES, Mailbox

HIDDEN, INNER, EXPERTS = 192, 96, 5
TIMEOUT_S = 60.0


class Shape(NamedTuple):
    hidden: int = HIDDEN
    inner: int = INNER
    bits: int = 4
    group: int = 32
    dtype: torch.dtype = torch.bfloat16


SMALL = Shape()


def random_expert(shape: Shape) -> dict[str, QTensor]:
    def matrix(rows: int, width: int) -> QTensor:
        weight = (torch.randn(rows, width) * width**-0.5).to(shape.dtype)
        return QTensor(*affine.encode(weight, shape.bits, shape.group), shape.bits, shape.group, (rows, width))

    return {
        "gate": matrix(shape.inner, shape.hidden),
        "up": matrix(shape.inner, shape.hidden),
        "down": matrix(shape.hidden, shape.inner),
    }


def random_layers(shape: Shape, layers: int = 2) -> tuple[list[Tensor], dict[str, QTensor]]:
    """Return blobs with some bytes of padding, and the matrices of one expert."""
    experts = [[random_expert(shape) for _ in range(EXPERTS)] for _ in range(layers)]
    blobs = [torch.stack([torch.nn.functional.pad(blob_of(each), (0, 128)) for each in layer]) for layer in experts]
    return blobs, experts[0][0]


def make_worker(shape: Shape = SMALL, threads: int = 2, max_pairs: int = 32, max_tokens: int = 4) -> CpuExpertWorker:
    torch.manual_seed(0)
    blobs, like = random_layers(shape)
    return CpuExpertWorker(blobs, like, shape.hidden, shape.inner, threads, max_pairs, max_tokens)


class Device:
    """Writes requests as a GPU does, and waits for the answers."""

    def __init__(self, mailbox: Mailbox):
        self.mailbox = mailbox
        names = ("request_seq", "done_seq", "layer", "count", "pairs", "experts", "x", "result")
        self.fields = {name: mailbox.numpy(name) for name in names}

    def send(self, layer: int, tokens: Sequence[int], experts: Sequence[int], x: Tensor | None = None) -> int:
        fields, count = self.fields, len(tokens)
        fields["layer"][0], fields["count"][0] = layer, count
        fields["pairs"][:count], fields["experts"][:count] = tokens, experts
        if x is not None:
            self.mailbox.x[: len(x)] = x
        number = (int(fields["request_seq"][0]) + 1) % 2**31
        fields["request_seq"][0] = number
        return number

    def wait(self, number: int) -> None:
        end = time.monotonic() + TIMEOUT_S
        while self.fields["done_seq"][0] != number:
            assert time.monotonic() < end, "the worker does not answer"
            time.sleep(0)

    def ask(self, layer: int, tokens: Sequence[int], experts: Sequence[int], x: Tensor | None = None) -> Tensor:
        self.wait(self.send(layer, tokens, experts, x))
        return self.mailbox.result[: len(tokens)].clone()


def like_of(blobs: Tensor, shape: Shape) -> Experts:
    return Experts.from_blobs(blobs, random_expert(shape))


def reference(experts: Experts, tokens: Sequence[int], ids: Sequence[int], x: Tensor) -> Tensor:
    parts = torch.empty(len(tokens), 1, x.shape[1])
    expert_parts.reference(x[list(tokens)], torch.tensor(ids, dtype=torch.int32)[:, None], experts, parts)
    return parts[:, 0]


def rounded_reference(experts: Experts, tokens: Sequence[int], ids: Sequence[int], x: Tensor) -> Tensor:
    """Compute pairs in float64 with the hidden vector rounded to bf16, as the GPU does."""
    found = []
    for token, expert in zip(tokens, ids, strict=True):
        gate, up, down = (dense(stack[expert]).double() for stack in experts.stacks)
        hidden = torch.nn.functional.silu(gate @ x[token].double()) * (up @ x[token].double())
        found.append(down @ hidden.bfloat16().double())
    return torch.stack(found).float()


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


SHAPES = [
    Shape(),
    pytest.param(Shape(hidden=2048, inner=768, group=64), marks=pytest.mark.slow),
    Shape(hidden=320, inner=192, group=64),
    pytest.param(Shape(hidden=384, inner=640, group=128), marks=pytest.mark.slow),
    Shape(hidden=320, inner=192, bits=8, group=64),
    Shape(hidden=320, inner=192, group=64, dtype=torch.float16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_match_the_reference(shape: Shape):
    cpu = make_worker(shape)
    tokens, ids, x = [0, 3, 1, 2, 0, 2, 2], [4, 1, 1, 1, 2, 0, 4], torch.randn(4, shape.hidden).bfloat16()
    with cpu:
        device = Device(cpu.mailbox)
        for layer in (1, 0):
            found, experts = device.ask(layer, tokens, ids, x), like_of(cpu._blobs[layer], shape)
            # only a sum next to a rounding boundary of the hidden vector may round differently
            assert error(found, rounded_reference(experts, tokens, ids, x)) < 3e-4
            assert error(found, reference(experts, tokens, ids, x)) < 4e-3
    assert cpu.error is None


@pytest.mark.skipif(LANES != 16, reason="bf16 products need AVX-512")
def test_bf16_products_match_the_reference(monkeypatch: pytest.MonkeyPatch):
    shape, tokens, ids = Shape(hidden=320, inner=192, group=64), [0, 1, 2, 0], [3, 3, 3, 1]
    monkeypatch.setattr(worker, "HAS_BF16", True)
    cpu, x = make_worker(shape), torch.randn(3, 320).bfloat16()
    with cpu:
        found = Device(cpu.mailbox).ask(0, tokens, ids, x)
    assert error(found, rounded_reference(like_of(cpu._blobs[0], shape), tokens, ids, x)) < 3e-4


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_do_not_depend_on_threads_or_other_pairs(threads: int):
    x, ids = torch.randn(4, HIDDEN).bfloat16(), [0, 1, 2, 3, 1, 1]
    with make_worker(threads=1) as cpu:
        device = Device(cpu.mailbox)
        wanted = torch.cat([device.ask(0, [i % 4], [expert], x) for i, expert in enumerate(ids)])
    with make_worker(threads=threads) as cpu:
        found = Device(cpu.mailbox).ask(0, [i % 4 for i in range(len(ids))], ids, x)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 5])
def test_ten_thousand_requests(threads: int):
    chance = random.Random(0)
    x = torch.randn(4, HIDDEN).bfloat16()
    wrong: list[str] = []
    with make_worker(threads=threads) as cpu:
        device = Device(cpu.mailbox)
        every = torch.stack([device.ask(layer, [t], [e], x)[0] for layer in range(2) for t in range(4) for e in range(EXPERTS)])
        table = every.view(2, 4, EXPERTS, HIDDEN).numpy()

        def run() -> None:
            for _ in range(10_000):
                layer, count = chance.randrange(2), chance.randrange(5)
                tokens, ids = ([chance.randrange(n) for _ in range(count)] for n in (4, EXPERTS))
                device.wait(device.send(layer, tokens, ids))
                if not np.array_equal(device.fields["result"][:count], table[layer, tokens, ids]):
                    wrong.append(f"layer {layer}, tokens {tokens}, experts {ids}")

        simulated = threading.Thread(target=run)
        simulated.start()
        simulated.join()
    assert wrong == []
    assert cpu.error is None


def test_request_numbers_wrap():
    with make_worker() as cpu:
        wanted = Device(cpu.mailbox).ask(0, [0], [1], torch.ones(1, HIDDEN).bfloat16())
    cpu.mailbox.request_seq[0] = cpu.mailbox.done_seq[0] = 2**31 - 2
    with cpu:
        device = Device(cpu.mailbox)
        for number in (2**31 - 1, 0, 1):
            assert torch.equal(device.ask(0, [0], [1]), wanted)
            assert int(cpu.mailbox.done_seq) == number


def test_threads_start_again_and_answer_a_waiting_request():
    cpu = make_worker()
    device, x = Device(cpu.mailbox), torch.randn(1, HIDDEN).bfloat16()
    cpu.stop()
    cpu.start()
    with pytest.raises(SettingsError, match="run already"):
        cpu.start()
    first = device.ask(1, [0], [2], x)
    cpu.stop()
    assert not any(thread.name.startswith("cpu-experts") for thread in threading.enumerate())
    number = device.send(1, [0], [2])
    cpu.mailbox.result.zero_()
    with cpu:
        device.wait(number)
    assert torch.equal(cpu.mailbox.result[:1], first)


def test_threads_end_with_their_owner():
    cpu = make_worker()
    cpu.start()
    threads = cpu._running.threads if cpu._running else []
    del cpu
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(
    ("layer", "tokens", "experts", "reason"),
    [
        (2, [0], [0], "layer"),
        (-1, [0], [0], "layer"),
        (0, [0, 4], [0, 0], "token"),
        (0, [-1], [0], "token"),
        (0, [0], [EXPERTS], "expert"),
        (0, [0, 0], [1, -1], "expert"),
    ],
)
def test_wrong_requests_set_the_error(layer: int, tokens: list[int], experts: list[int], reason: str):
    with make_worker() as cpu:
        device = Device(cpu.mailbox)
        assert device.ask(layer, tokens, experts).isnan().all()
        assert reason in (cpu.error or "")
        # it stays until it is cleared, and requests go on
        assert device.ask(0, [0], [0], torch.ones(1, HIDDEN).bfloat16()).isfinite().all()
        assert reason in (cpu.error or "")
        cpu.clear_error()
        assert cpu.error is None


@pytest.mark.parametrize("count", [-1, 33])
def test_a_wrong_count_sets_the_error(count: int):
    with make_worker() as cpu:
        device = Device(cpu.mailbox)
        cpu.mailbox.result.zero_()
        cpu.mailbox.count[0] = count
        device.fields["request_seq"][0] += 1
        device.wait(1)
        assert "pairs" in (cpu.error or "")
        assert (cpu.mailbox.result == 0).all()


def test_an_empty_request_is_answered():
    with make_worker() as cpu:
        assert Device(cpu.mailbox).ask(0, [], []).shape == (0, HIDDEN)
    assert cpu.error is None


def test_idle_threads_sleep_and_wake():
    with make_worker(threads=5) as cpu:
        device, x = Device(cpu.mailbox), torch.ones(1, HIDDEN).bfloat16()
        wanted = device.ask(0, [0], [0], x)
        time.sleep(0.1)
        before, start = time.process_time(), time.monotonic()
        time.sleep(0.5)
        busy, wall = time.process_time() - before, time.monotonic() - start
        # five polling threads would use at least one core
        assert busy < 0.5 * wall
        assert torch.equal(device.ask(0, [0], [0]), wanted)
        time.sleep(0.1)
        cpu.wake()
        assert torch.equal(device.ask(0, [0], [0]), wanted)


def test_the_mailbox_has_aligned_fields():
    box = Mailbox(HIDDEN, 7, 3)
    assert box.memory.data_ptr() % PAGE_NBYTES == box.memory.nbytes % PAGE_NBYTES == 0
    offsets = box.offsets
    assert offsets["done_seq"] - offsets["request_seq"] == 128
    assert all(offset % 128 == 0 for name, offset in offsets.items() if name != "count")
    assert offsets["count"] == offsets["layer"] + 4
    for name, field in box.fields.items():
        assert box.view(name).data_ptr() == box.address(name) == box.memory.data_ptr() + field.offset
        assert tuple(box.numpy(name).shape) == field.shape


def test_other_formats_are_refused():
    like = random_expert(Shape())
    assert CpuExpertWorker.refuses(like) is None
    for changed, reason in (
        ({"gate": random_expert(Shape(bits=3))["gate"]}, "3 bits"),
        ({"down": random_expert(Shape(bits=8))["down"]}, "differ"),
        ({"up": like["up"].interleave(4)}, "interleaved"),
    ):
        assert reason in (CpuExpertWorker.refuses({**like, **changed}) or "")
    without_gate = {name: like[name] for name in ("up", "down")}
    assert "gate" in (CpuExpertWorker.refuses(without_gate) or "")
    with pytest.raises(FormatError, match="no 'gate'"):
        CpuExpertWorker([], without_gate, HIDDEN, INNER, 1)


def test_wrong_arguments_are_refused():
    blobs, like = random_layers(Shape(), 1)
    for given, reason in (
        (([], like, HIDDEN, INNER, 1), "no layers"),
        (([blobs[0][:, :100]], like, HIDDEN, INNER, 1), "100 bytes"),
        (([blobs[0].int()], like, HIDDEN, INNER, 1), "int32"),
        ((blobs, like, INNER, HIDDEN, 1), "hidden 96"),
    ):
        with pytest.raises(FormatError, match=reason):
            CpuExpertWorker(*given)
    with pytest.raises(SettingsError, match="0 threads"):
        CpuExpertWorker(blobs, like, HIDDEN, INNER, 0)
