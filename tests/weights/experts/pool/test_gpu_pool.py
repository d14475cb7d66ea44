"""`GpuExpertPool`: experts in host memory with a cache of GPU slots give the results of resident experts."""

from dataclasses import replace

import pytest
import torch

from auraflux.errors import SettingsError
from auraflux.ops import Clamp, Experts, Routing, route
from auraflux.ops.moe.experts import BIASES, KINDS, blob_of
from auraflux.ops.moe.pool import CLOCK, MISSES, PREFETCHED
from auraflux.quant import quantize
from auraflux.weights.experts.pool.gpu_pool import GpuExpertPool, PoolPlan
from auraflux.weights.experts.pool.pooled_experts import PooledExperts
from auraflux.weights.experts.resident import MixtureInput, ResidentExperts

LAYERS, COUNT = 3, 16
ROUTING = Routing(4, "softmax", True)


def make_layer(hidden: int, inner: int, bits: int = 4, biased: bool = False, group: int = 64) -> Experts:
    def stack(rows: int, width: int):
        return quantize((torch.randn(COUNT, rows, width) / width**0.5).bfloat16(), bits, group)

    made = Experts(stack(inner, hidden), stack(inner, hidden), stack(hidden, inner))
    if not biased:
        return made
    biases = {
        "gate_bias": torch.randn(COUNT, inner),
        "up_bias": torch.randn(COUNT, inner),
        "down_bias": torch.randn(COUNT, hidden),
    }
    return replace(made, **biases, activation=Clamp(1.702, 7.0))


def expert(experts: Experts, number: int) -> dict:
    return {name: each[number] for name in (*KINDS, *BIASES) if (each := getattr(experts, name)) is not None}


def pool_of(layers: list[Experts], slots: int, device: str) -> tuple[GpuExpertPool, list[PooledExperts]]:
    nbytes = max(len(blob_of(expert(each, 0))) for each in layers) + 16
    plan = PoolPlan(len(layers), COUNT, ROUTING.k, slots * nbytes, 4 * COUNT * len(layers) * nbytes + (16 << 20), cpu=False)
    store = GpuExpertPool(plan, torch.device(device))
    made = []
    for layer in layers:

        def load(rows: torch.Tensor, layer: Experts = layer) -> None:
            for number, row in enumerate(rows):
                blob_of(expert(layer, number), row)

        made.append(store.add_layer(expert(layer, 0), layer.activation, load))
    store.finish()
    return store, made


def inputs(tokens: int, hidden: int, device: str, dtype: torch.dtype) -> MixtureInput:
    x, residual = torch.randn(2, tokens, hidden).to(device, dtype)
    scores = torch.randn(tokens, COUNT).to(device, dtype)
    return MixtureInput(x, scores, ROUTING, None, residual, None, None)


def moved(experts: Experts, device: str) -> ResidentExperts:
    return ResidentExperts(replace(experts, **{name: getattr(experts, name).to(device) for name in expert(experts, 0)}))


@pytest.mark.parametrize("biased", [False, True])
def test_pooled_experts_equal_resident_ones_on_a_cpu(biased: bool):
    torch.manual_seed(0)
    layers = [make_layer(64, 32, group=32, biased=biased), make_layer(64, 32, bits=8, group=32, biased=biased)]
    store, pooled = pool_of(layers, 9, "cpu")
    # the reference multiplies float32 activations
    for _ in range(3):
        for layer, mine in zip(layers, pooled, strict=True):
            given = inputs(2, 64, "cpu", torch.float32)
            from auraflux.ops import exact

            with exact(True):
                expected = ResidentExperts(layer).forward(given)
            torch.testing.assert_close(mine.forward(given), expected, rtol=1e-4, atol=1e-4)
    hits, misses = store.cache_stats().total.hits, store.cache_stats().total.misses
    assert misses > 0
    assert hits > 0
    assert int(store.pool.state[CLOCK]) == 12


def test_tables_agree_after_evictions():
    torch.manual_seed(1)
    store, pooled = pool_of([make_layer(64, 32, group=32) for _ in range(LAYERS)], 10, "cpu")
    for _ in range(4):
        for mine in pooled:
            mine.forward(inputs(1, 64, "cpu", torch.float32))
    pool = store.pool
    owned = {int(owner): slot for slot, owner in enumerate(pool.owners) if owner >= 0}
    found = {index: int(slot) for index, slot in enumerate(pool.slots.view(-1)) if slot >= 0}
    assert owned == found
    for owner, slot in owned.items():
        first, nbytes = int(pool.offsets.view(-1)[owner]), pool.nbytes[owner // COUNT]
        assert torch.equal(pool.memory[slot, :nbytes], pool.host[first : first + nbytes])


def test_the_experts_in_use_are_not_evicted():
    torch.manual_seed(2)
    store, (mine, *_) = pool_of([make_layer(64, 32, group=32) for _ in range(2)], 4, "cpu")
    ids = torch.tensor([[12, 13, 14, 15]], dtype=torch.int32)
    mine._fetched(ids)
    assert sorted(store.pool.slots[0, 12:].tolist()) == [0, 1, 2, 3]


def test_too_little_memory_is_refused_with_the_minimum():
    with pytest.raises(SettingsError, match=r"a token uses 4 experts of .* Give at least"):
        pool_of([make_layer(64, 32, group=32)], 3, "cpu")


def test_a_pool_of_all_experts_is_resident():
    store, _ = pool_of([make_layer(64, 32, group=32) for _ in range(2)], 3 * COUNT, "cpu")
    assert store.resident
    assert "all are in GPU memory" in store.notes[0]


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [9, 26, 3 * COUNT])
@pytest.mark.parametrize("kind", ["int4", "int8", "biased"])
def test_pooled_experts_equal_resident_ones_on_a_gpu(kind: str, slots: int):
    """Bit for bit: few tokens, batches, streamed prefill in one pass and in several."""
    torch.manual_seed(3)
    bits, biased = {"int4": (4, False), "int8": (8, False), "biased": (4, True)}[kind]
    layers = [make_layer(512, 256, bits, biased) for _ in range(LAYERS)]
    store, pooled = pool_of(layers, slots, "cuda")
    resident = [moved(layer, "cuda") for layer in layers]
    assert store.pinned
    for tokens in (1, 3, 1, 7, 300, 1, 64, 1):
        for mine, theirs in zip(pooled, resident, strict=True):
            given = inputs(tokens, 512, "cuda", torch.bfloat16)
            found, expected = mine.forward(given), theirs.forward(given)
            error = float((found.float() - expected.float()).norm() / expected.float().norm())
            # several passes sum separately rounded parts
            if store.streams(tokens * ROUTING.k) and not store.stream.single_pass:
                assert error < 4e-3, (tokens, error)
            else:
                assert torch.equal(found, expected), (tokens, error)


@pytest.mark.gpu
@pytest.mark.parametrize("fetched", [0.0, 0.5, 1.0])
def test_the_cpu_computes_missing_experts(fetched: float):
    torch.manual_seed(5)
    layers = [make_layer(512, 256) for _ in range(LAYERS)]
    store, pooled = pool_of(layers, 14, "cuda")
    resident = [moved(layer, "cuda") for layer in layers]
    store.share_with_cpu(measure=False)
    mailbox = store.pool.mailbox
    assert mailbox is not None
    mailbox.fetched.copy_(fetched * torch.arange(len(mailbox.fetched)))
    for tokens in (1, 2, 4, 1, 1, 5):
        for mine, theirs in zip(pooled, resident, strict=True):
            given = inputs(tokens, 512, "cuda", torch.bfloat16)
            found, expected = mine.forward(given).float(), theirs.forward(given).float()
            assert float((found - expected).norm() / expected.norm()) < 2e-3
    assert (store.cache_stats().total.on_cpu > 0) == (fetched < 1)


@pytest.mark.gpu
def test_steps_with_misses_are_replayed_as_a_graph():
    torch.manual_seed(4)
    layers = [make_layer(512, 256) for _ in range(LAYERS)]
    store, pooled = pool_of(layers, 14, "cuda")
    resident = [moved(layer, "cuda") for layer in layers]
    given = inputs(1, 512, "cuda", torch.bfloat16)
    run = [mine.forward(given) for mine in pooled]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run = [mine.forward(given) for mine in pooled]
    before = int(store.pool.state[MISSES])
    for _ in range(10):
        fresh = inputs(1, 512, "cuda", torch.bfloat16)
        for name in ("x", "scores", "residual"):
            getattr(given, name).copy_(getattr(fresh, name))
        graph.replay()
        for found, theirs in zip(run, resident, strict=True):
            assert torch.equal(found, theirs.forward(fresh))
    assert int(store.pool.state[MISSES]) > before


@pytest.mark.gpu
def test_a_prompt_leaves_the_pool_consistent():
    # a prompt runs the last layer for one token or not at all
    torch.manual_seed(6)
    layers = [make_layer(512, 256) for _ in range(4)]
    store, pooled = pool_of(layers, 26, "cuda")
    for ends in (4, 3, 4, 3):
        store.before_step(64)
        for mine in pooled[:3]:
            mine.forward(inputs(64, 512, "cuda", torch.bfloat16))
        for mine in pooled[3:ends]:
            mine.forward(inputs(1, 512, "cuda", torch.bfloat16))
        store.before_step(1)
        for mine, layer in zip(pooled, layers, strict=True):
            given = inputs(1, 512, "cuda", torch.bfloat16)
            assert torch.equal(mine.forward(given), moved(layer, "cuda").forward(given))
    pool = store.pool
    torch.cuda.synchronize()
    owned = {int(owner): slot for slot, owner in enumerate(pool.owners.tolist()) if owner >= 0}
    assert owned == {index: slot for index, slot in enumerate(pool.slots.view(-1).tolist()) if slot >= 0}
    for owner, slot in owned.items():
        first, nbytes = int(pool.offsets.view(-1)[owner]), pool.nbytes[owner // COUNT]
        assert torch.equal(pool.memory[slot, :nbytes].cpu(), pool.host[first : first + nbytes])


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [16, 26, 44])
def test_parts_of_a_step_share_the_copies_of_a_layer(slots: int):
    torch.manual_seed(9)
    layers = [make_layer(512, 256) for _ in range(4)]
    store, pooled = pool_of(layers, slots, "cuda")
    resident = [moved(layer, "cuda") for layer in layers]
    assert store.chunks_by_layer(4096) == 4
    for parts in (1, 3, 2, 4):
        before = store.cache_stats().total
        store.before_step(64 * parts, parts)
        for mine, theirs in zip(pooled[:3], resident, strict=False):
            for _ in range(parts):
                given = inputs(64, 512, "cuda", torch.bfloat16)
                assert torch.equal(mine.forward(given), theirs.forward(given))
        used = store.cache_stats().total - before
        assert used.hits + used.misses == 3 * COUNT
        store.before_step(1)
        for mine, theirs in zip(pooled, resident, strict=True):
            given = inputs(1, 512, "cuda", torch.bfloat16)
            assert torch.equal(mine.forward(given), theirs.forward(given))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_slots_are_given_up_and_the_most_used_experts_stay(device: str):
    torch.manual_seed(7)
    layers = [make_layer(512, 256) for _ in range(LAYERS)]
    store, pooled = pool_of(layers, 26, device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hot = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32, device=device)
    for _ in range(20):
        pooled[1]._fetched(hot)
    size = store.pool.memory.shape[1]
    assert store.give_up(9 * size - 5) == 9 * size
    assert len(store.pool.memory) == 17
    assert (store.pool.slots[1, 1:5] >= 0).all()
    assert "17 of 26 slots are left" in store.notes[-1]
    # too few slots would be left for a token
    assert store.give_up(6 * size) == 0
    for tokens in (1, 5, 80 if device == "cuda" else 3, 1):
        for mine, layer in zip(pooled, layers, strict=True):
            given = inputs(tokens, 512, device, dtype)
            expected = moved(layer, device).forward(given)
            assert float((mine.forward(given) - expected).norm() / expected.norm()) < 1e-2
    owned = {int(owner): slot for slot, owner in enumerate(store.pool.owners.tolist()) if owner >= 0}
    assert owned == {index: slot for index, slot in enumerate(store.pool.slots.view(-1).tolist()) if slot >= 0}


def decoded(store: GpuExpertPool, pooled: list[PooledExperts], steps: int, right: bool) -> None:
    """Run decode steps whose layers predict the experts of the next one, rightly or not."""
    for _ in range(steps):
        store.before_step(1)
        given = [inputs(1, 64, "cpu", torch.float32) for _ in pooled]
        ids = [route(each.scores, ROUTING)[0] for each in given]
        for layer, mine in enumerate(pooled[:-1]):
            following = ids[layer + 1] if right else (ids[layer + 1] + COUNT // 2) % COUNT
            mine.prefetch_with(lambda residual, following=following: following)
        for mine, each in zip(pooled, given, strict=True):
            mine.forward(each)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> tuple[GpuExpertPool, list[PooledExperts]]:
    """Return a pool whose layers run as on a GPU that reads host memory."""
    monkeypatch.setattr(GpuExpertPool, "pinned", True)
    torch.manual_seed(5)
    return pool_of([make_layer(64, 32, group=32) for _ in range(4)], 20, "cpu")


def test_a_predicted_expert_is_there_before_its_layer_runs(pinned):
    store, pooled = pinned
    decoded(store, pooled, 30, right=True)
    stats, (layers, count) = store.cache_stats().total, store.pool.slots.shape
    # of the layers after the first, but the last
    assert 40 < stats.prefetched <= 2 * 30
    assert stats.hits + stats.misses + stats.prefetched == 30 * layers * ROUTING.k
    assert stats.nbytes == (int(store.pool.state[MISSES]) + int(store.pool.state[PREFETCHED])) * store.pool.memory.shape[1]
    owned = {int(owner): slot for slot, owner in enumerate(store.pool.owners) if owner >= 0}
    assert owned == {index: int(slot) for index, slot in enumerate(store.pool.slots.view(-1)) if slot >= 0}
    for owner, slot in owned.items():
        first, nbytes = int(store.pool.offsets.view(-1)[owner]), store.pool.nbytes[owner // count]
        assert torch.equal(store.pool.memory[slot, :nbytes], store.pool.host[first : first + nbytes])


def test_wrong_predictions_end(pinned):
    store, pooled = pinned
    decoded(store, pooled, 64, right=False)
    # half of the experts are predicted wrongly each time: 7 wrong ones in a row end it but for a trial every 16 steps
    assert int(store.pool.state[PREFETCHED]) < 64
    assert float(store.pool.trust[1:3].max()) <= 0.5
    assert torch.equal(store.pool.trust[[0, 3]], torch.ones(2))
