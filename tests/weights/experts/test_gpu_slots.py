"""GPU slots over a cache in host memory, with fake CUDA streams and events; `gpu` tests use real ones."""

from pathlib import Path
from typing import Any

import pytest
import torch

from auraflux.ops import expert_mlp
from auraflux.weights.experts.disk_reader import DiskReader
from auraflux.weights.experts.expert_cache import ExpertCache, HostSlots
from auraflux.weights.experts.gpu_slots import GpuSlots
from auraflux.weights.experts.offloaded import OffloadedExperts
from auraflux.weights.experts.settings import ExpertSettings, plan_expert_cache
from auraflux.weights.experts.stats import ExpertCacheCounters
from auraflux.weights.experts.store import ExpertStore
from tests.weights.experts.packed import COUNT, HIDDEN, INNER, write_experts

K = 3


class Event:
    """Fake event that has passed from its second query on, or after a wait."""

    def __init__(self) -> None:
        self.queries = 0

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        self.queries += 1
        return self.queries > 1

    def synchronize(self) -> None:
        self.queries = 2


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
    """Replace CUDA streams and events; return the stream that kernels run on."""
    stream = Stream()
    fakes = {"Event": Event, "stream": lambda given: given, "current_stream": lambda device: stream}
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return stream


@pytest.mark.parametrize(("slots", "host_slots"), [(K, K), (K, COUNT), (COUNT // 2, COUNT // 2), (COUNT, COUNT)])
def test_two_caches_are_bitwise_equal_to_resident_experts(tmp_path: Path, kernels: Stream, slots: int, host_slots: int):
    torch.manual_seed(0)
    files, resident = write_experts(tmp_path, layers=1)
    file, reader, counters, copies = files.files[0], DiskReader(), ExpertCacheCounters(), Stream()
    host_cache = ExpertCache(HostSlots(file, host_slots, reader, counters))
    layer = OffloadedExperts(file, ExpertCache(GpuSlots(host_cache, slots, copies)), reader, counters)  # type: ignore[arg-type]
    for tokens in (1, 1, 30, 1, 2, 30, 1):
        ids = torch.stack([torch.randperm(COUNT)[:K] for _ in range(tokens)]).int()
        x, weights = torch.randn(tokens, HIDDEN), torch.rand(tokens, K)
        layer.fetch(ids)
        assert torch.equal(layer(x, ids, weights), expert_mlp(x, ids, weights, resident[0]))
    assert kernels.waited
    assert (len(copies.waited) > 0) == (slots < COUNT)
    if host_slots == COUNT:
        assert counters.snapshot().nbytes == COUNT * file.stride


@pytest.mark.gpu
@pytest.mark.parametrize(("slots", "host_slots"), [(K, K), (K, COUNT), (COUNT // 2, COUNT), (COUNT, COUNT)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpu_slots_are_bitwise_equal_to_resident_experts(tmp_path: Path, slots: int, host_slots: int, dtype: torch.dtype):
    torch.manual_seed(0)
    files, resident = write_experts(tmp_path, layers=2, lanes=1)
    plan = plan_expert_cache(files, K, slots * sum(file.stride for file in files.files), "direct")
    store = ExpertStore(files, plan, ExpertSettings(), device="cuda", host_slots=host_slots)
    layers = [store.layer(file.module, COUNT, HIDDEN, INNER, {}, None) for file in files.files]
    on_gpu = [type(each)(each.gate.to("cuda"), each.up.to("cuda"), each.down.to("cuda")) for each in resident]
    for tokens in (1, 1, 30, 1, 2, 200, 1):
        ids = torch.stack([torch.randperm(COUNT)[:K] for _ in range(tokens)]).int().cuda()
        x, weights = torch.randn(tokens, HIDDEN, device="cuda", dtype=dtype), torch.rand(tokens, K, device="cuda")
        for layer, experts in zip(layers, on_gpu, strict=True):
            layer.fetch(ids)
            assert torch.equal(layer(x, ids, weights), expert_mlp(x, ids, weights, experts))
