"""`GpuExpertPool` with experts on disk, on a GPU: the bits of resident experts, as CUDA graphs, and after read errors."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from auraflux.errors import ExpertError
from auraflux.ops import Experts, Routing
from auraflux.weights.experts.packed_files import ExpertFiles
from auraflux.weights.experts.pool.gpu_pool import GpuExpertPool, PoolPlan
from auraflux.weights.experts.pool.pooled_experts import PooledExperts
from auraflux.weights.experts.resident import MixtureInput, ResidentExperts
from auraflux.weights.experts.settings import plan_expert_cache
from auraflux.weights.experts.store import ExpertStore
from tests.weights.experts.packed import write_experts

pytestmark = pytest.mark.gpu
LAYERS, COUNT, HIDDEN, INNER = 3, 16, 512, 256
ROUTING = Routing(4, "softmax", True)
Made = tuple[GpuExpertPool, list[PooledExperts]]


@pytest.fixture
def model(tmp_path: Path) -> tuple[ExpertFiles, list[ResidentExperts]]:
    torch.manual_seed(0)
    files, resident = write_experts(tmp_path, LAYERS, COUNT, HIDDEN, INNER, lanes=1)
    return files, [ResidentExperts(_on_gpu(each)) for each in resident]


def _on_gpu(experts: Experts) -> Experts:
    return replace(experts, **{name: getattr(experts, name).to("cuda") for name in ("gate", "up", "down")})


def pool_of(files: ExpertFiles, slots: int, host: int, bandwidth: int | None = None) -> Made:
    stride = files.files[0].stride
    sizes = LAYERS, COUNT, ROUTING.k, slots * stride, host * stride
    store = GpuExpertPool(PoolPlan(*sizes, cpu=False, disk=True, disk_bandwidth=bandwidth), torch.device("cuda"))
    made = [store.add_disk_layer(file, file.like, None, {}) for file in files.files]
    store.finish()
    assert store.pinned
    return store, made


def inputs(tokens: int) -> MixtureInput:
    x, residual = torch.randn(2, tokens, HIDDEN, device="cuda").bfloat16()
    return MixtureInput(x, torch.randn(tokens, COUNT, device="cuda").bfloat16(), ROUTING, None, residual, None, None)


@pytest.mark.parametrize(("slots", "host"), [(9, 5), (9, 20), (26, 16), (40, 48)])
def test_experts_on_disk_equal_resident_ones(model, slots: int, host: int):
    """Bit for bit: few tokens, batches, streamed prefill in one pass and in several."""
    files, resident = model
    store, pooled = pool_of(files, slots, host)
    for tokens in (1, 3, 1, 7, 300, 1, 64, 1):
        for mine, theirs in zip(pooled, resident, strict=True):
            given = inputs(tokens)
            found, expected = mine.forward(given), theirs.forward(given)
            if store.streams(tokens * ROUTING.k) and not store.stream.single_pass:
                assert float((found.float() - expected.float()).norm() / expected.float().norm()) < 4e-3
            else:
                assert torch.equal(found, expected), tokens
    assert store.cache_stats().total.from_disk >= LAYERS * COUNT


def captured(pooled: list[PooledExperts]) -> tuple[MixtureInput, torch.cuda.CUDAGraph, list[torch.Tensor]]:
    given = inputs(1)
    run = [mine.forward(given) for mine in pooled]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run = [mine.forward(given) for mine in pooled]
    return given, graph, run


def replayed(given: MixtureInput, graph: torch.cuda.CUDAGraph) -> MixtureInput:
    fresh = inputs(1)
    for name in ("x", "scores", "residual"):
        getattr(given, name).copy_(getattr(fresh, name))
    graph.replay()
    return fresh


@pytest.mark.parametrize(("slots", "host"), [(4, 4), (4, COUNT), (8, COUNT), (COUNT, COUNT)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_store_on_a_gpu_equals_resident_experts(model, slots: int, host: int, dtype: torch.dtype):
    """As ranks use it: without a plan of the GPU's memory."""
    files, resident = model
    each = sum(file.stride for file in files.files)
    plan = plan_expert_cache(files, ROUTING.k, slots * each, "direct")
    store = ExpertStore(files, plan, device="cuda", host_nbytes=host * each)
    layers = [store.layer(file.module, COUNT, HIDDEN, INNER, {}, None) for file in files.files]
    store.finish()
    assert store.pool is not None
    for tokens in (1, 1, 30, 1, 2, 200, 1):
        ids = torch.stack([torch.randperm(COUNT)[: ROUTING.k] for _ in range(tokens)]).int().cuda()
        x, weights = torch.randn(tokens, HIDDEN, device="cuda", dtype=dtype), torch.rand(tokens, ROUTING.k, device="cuda")
        for mine, theirs in zip(layers, resident, strict=True):
            mine.fetch(ids)
            found, expected = mine(x, ids, weights), theirs(x, ids, weights)
            assert torch.equal(mine.partial_sum(x, ids, weights), theirs.partial_sum(x, ids, weights)), tokens
            if store.pool.streams(ids.numel()):
                # a stream stores the outputs of experts and sums them with another kernel
                assert float((found.float() - expected.float()).norm() / expected.float().norm()) < 4e-3, tokens
            else:
                assert torch.equal(found, expected), tokens


def failure(store: GpuExpertPool) -> str | None:
    """Return why the last step failed; None if it did not."""
    try:
        store.check()
    except ExpertError as err:
        return str(err)
    return None


def test_steps_that_read_from_disk_are_replayed_as_a_graph(model):
    files, resident = model
    store, pooled = pool_of(files, 9, 8)
    given, graph, run = captured(pooled)
    before = store.cache_stats().total.from_disk
    for _ in range(40):
        fresh = replayed(given, graph)
        store.check()
        for found, theirs in zip(run, resident, strict=True):
            assert torch.equal(found, theirs.forward(fresh))
    assert store.cache_stats().total.from_disk > before


def test_a_replayed_step_fails_and_the_next_one_works(model):
    files, resident = model
    store, pooled = pool_of(files, 9, 4)
    given, graph, run = captured(pooled)
    path = files.files[1].path
    data, failed = path.read_bytes(), 0
    for number in range(30):
        if number % 3 == 0:
            path.write_bytes(bytes(COUNT * files.files[1].stride))
        fresh = replayed(given, graph)
        if reason := failure(store):
            assert "does not match its checksum" in reason
            failed += 1
        else:
            for found, theirs in zip(run, resident, strict=True):
                assert torch.equal(found, theirs.forward(fresh))
        path.write_bytes(data)
    assert failed


def test_a_failed_read_ends_a_streamed_step(model):
    files, resident = model
    _, pooled = pool_of(files, 24, 12)
    path = files.files[1].path
    data = path.read_bytes()
    path.write_bytes(bytes(len(data)))
    with pytest.raises(ExpertError, match="does not match its checksum"):
        # the experts of the next layer are read ahead
        pooled[0].forward(inputs(300))
    path.write_bytes(data)
    for tokens in (1, 300, 1):
        for mine, theirs in zip(pooled, resident, strict=True):
            given = inputs(tokens)
            assert torch.equal(mine.forward(given), theirs.forward(given)), tokens


def test_a_kernel_does_not_wait_forever(model):
    files, resident = model
    store, pooled = pool_of(files, 9, 4)
    given, graph, run = captured(pooled)
    assert store.tier is not None
    store.tier.mailbox.patience.fill_(100)
    reasons = []
    for _ in range(20):
        replayed(given, graph)
        reasons.append(failure(store))
    assert any(reason is not None and "no answer" in reason for reason in reasons)
    store.tier.mailbox.patience.fill_(10**11)
    fresh = replayed(given, graph)
    store.check()
    for found, theirs in zip(run, resident, strict=True):
        assert torch.equal(found, theirs.forward(fresh))
