"""Slots of a GPU over slots of main memory, with streams and events that the test plays. `gpu` tests use real ones."""

from pathlib import Path
from typing import Any

import pytest
import torch

from auraflux.ops import expert_mlp
from auraflux.weights.bank import Bank, MainSlots
from auraflux.weights.device_slots import DeviceSlots
from auraflux.weights.expert_settings import ExpertSettings, share_out
from auraflux.weights.expert_store import ExpertStore
from auraflux.weights.reader import Reader
from auraflux.weights.streamed import Streamed
from auraflux.weights.traffic import Meter
from tests.weights.packed import COUNT, HIDDEN, INNER, write_experts

K = 3


class Event:
    """Passes when somebody asks for the second time, or waits."""

    def __init__(self) -> None:
        self.asked = 0

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 1

    def synchronize(self) -> None:
        self.asked = 2


class Stream:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.waited: list[Event] = []

    def wait_event(self, event: Event) -> None:
        self.waited.append(event)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None: ...


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The stream that kernels run on."""
    stream = Stream()
    played = {"Event": Event, "stream": lambda given: given, "current_stream": lambda device: stream}
    for name, value in played.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return stream


@pytest.mark.parametrize(("slots", "below"), [(K, K), (K, COUNT), (COUNT // 2, COUNT // 2), (COUNT, COUNT)])
def test_the_same_bits_through_two_banks(tmp_path: Path, kernels: Stream, slots: int, below: int):
    torch.manual_seed(0)
    files, resident = write_experts(tmp_path, layers=1)
    file, reader, meter, copies = files.files[0], Reader(), Meter(), Stream()
    main = Bank(MainSlots(file, below, reader, meter))
    layer = Streamed(file, Bank(DeviceSlots(main, slots, copies)), reader, meter)  # type: ignore[arg-type]
    for tokens in (1, 1, 30, 1, 2, 30, 1):
        ids = torch.stack([torch.randperm(COUNT)[:K] for _ in range(tokens)]).int()
        x, weights = torch.randn(tokens, HIDDEN), torch.rand(tokens, K)
        layer.fetch(ids)
        assert torch.equal(layer(x, ids, weights), expert_mlp(x, ids, weights, resident[0]))
    assert kernels.waited
    assert (len(copies.waited) > 0) == (slots < COUNT)
    if below == COUNT:
        assert meter.traffic().nbytes == COUNT * file.stride


@pytest.mark.gpu
@pytest.mark.parametrize(("slots", "below"), [(K, K), (K, COUNT), (COUNT // 2, COUNT), (COUNT, COUNT)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_same_bits_on_a_gpu(tmp_path: Path, slots: int, below: int, dtype: torch.dtype):
    torch.manual_seed(0)
    files, resident = write_experts(tmp_path, layers=2, lanes=1)
    share = share_out(files, K, slots * sum(file.stride for file in files.files), "direct")
    store = ExpertStore(files, share, ExpertSettings(), device="cuda", main_slots=below)
    layers = [store.layer(file.module, COUNT, HIDDEN, INNER, {}, None) for file in files.files]
    here = [type(each)(each.gate.to("cuda"), each.up.to("cuda"), each.down.to("cuda")) for each in resident]
    for tokens in (1, 1, 30, 1, 2, 200, 1):
        ids = torch.stack([torch.randperm(COUNT)[:K] for _ in range(tokens)]).int().cuda()
        x, weights = torch.randn(tokens, HIDDEN, device="cuda", dtype=dtype), torch.rand(tokens, K, device="cuda")
        for layer, held in zip(layers, here, strict=True):
            layer.fetch(ids)
            assert torch.equal(layer(x, ids, weights), expert_mlp(x, ids, weights, held))
