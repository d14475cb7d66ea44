"""Random weights whose experts go to a pool, and the skew of their routing."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file

from auraflux.bench.model import Ours, measure
from auraflux.bench.outline_sizes import outline_sizes
from auraflux.bench.random_weights import RandomExperts, RandomWeights, outlined_model, random_language
from auraflux.bench.routing import SkewedRouting, TracedRouting
from auraflux.bench.shapes import shape_of
from auraflux.cache import CacheSettings
from auraflux.engine.engine import nbytes
from auraflux.errors import FormatError, InputError
from auraflux.loading.gpu_division import GpuRequest
from auraflux.loading.gpu_plan import make_pool
from auraflux.models import family
from auraflux.weights.experts.pool.gpu_pool import GpuExpertPool
from auraflux.weights.experts.pool.pooled_experts import PooledExperts
from auraflux.weights.experts.resident import MixtureInput

SMALL = {
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "vocab_size": 256,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
CPU = torch.device("cpu")


def shape() -> dict:
    return shape_of("qwen3-30b-a3b", 3) | SMALL


def test_experts_in_a_pool():
    model, _ = outlined_model(shape(), 4, 64, "cuda")
    sizes = outline_sizes(model, 8).experts
    assert sizes is not None
    assert (sizes.layers, sizes.count, sizes.inner) == (3, 16, 64)
    pool = make_pool(sizes, sizes.total, CPU)
    weights = RandomWeights(4, 64, torch.bfloat16, CPU)
    weights.expert_pool, weights.layout = pool, "cuda"
    module = family(shape())
    made = module.Model(module.Config.from_hf(shape()), weights)
    pool.finish()
    assert abs(nbytes(made) - outline_sizes(model, 8).total) <= 1024
    assert pool.resident
    assert pool.pool.memory.shape == (3 * 16, sizes.nbytes)
    first, second, third = (each.up.dequantize() for each in pool.layers)
    assert torch.equal(first, second)
    assert torch.equal(second, third)
    # experts differ, and keep the variance of their input
    assert not torch.equal(first[0], first[1])
    assert 0.9 < first.std() * first.shape[-1] ** 0.5 < 1.1


def test_traffic_of_a_random_model():
    config = shape() | {"num_experts": 64, "num_hidden_layers": 2}
    gpu = GpuRequest(2 * 10**9, True, 1, slots=80 * 13_824)
    loaded = random_language(config, CacheSettings("none"), CPU, context=64, experts=RandomExperts(SkewedRouting(), gpu))
    pool = loaded.experts
    assert isinstance(pool, GpuExpertPool)
    # the CPU interleaves rows, so experts are a little larger
    assert 64 <= len(pool.pool.memory) <= 80
    (speed,) = measure([Ours(loaded.scheduler, 1, pool)], [6], 256, 4, 1, lambda what: None)
    traffic = speed.experts
    assert traffic is not None
    assert 0 < traffic.misses_per_token < 16
    assert traffic.hit_rate == pytest.approx(1 - traffic.misses_per_token / 16)
    assert traffic.nbytes_per_token == traffic.misses_per_token * pool.pool.memory.shape[1]


def test_weights_of_an_outline():
    model, _ = outlined_model(shape(), 4, 64, "cuda")
    sizes = outline_sizes(model, 8)
    attention, embeddings = 3 * 128 * (2 * 2 + 2) * 32, 2 * 256 * 128
    routers = 3 * 16 * 128
    expected = 4.5 / 8 * (attention + embeddings) + 2 * routers
    assert expected <= sizes.weights <= expected + 20_000


def test_skewed_routers_prefer_some_experts():
    def share(skew: float) -> float:
        """Return the share of tokens that the first quarter of experts gets."""
        weights = RandomWeights(4, 64, torch.float32, CPU, routing=SkewedRouting(skew))
        router = weights.matrix("model.layers.0.mlp.gate", 128, 256)
        assert isinstance(router, torch.Tensor)
        scores = torch.randn(512, 256, generator=torch.Generator().manual_seed(1)) @ router.T
        counts = torch.bincount(scores.topk(8).indices.flatten(), minlength=128)
        return float(counts.sort(descending=True).values[:32].sum() / counts.sum())

    assert share(0.0) < 0.4
    assert share(0.6) > 0.6


TRACES = Path(__file__).parents[2] / "bench" / "traces"


def test_a_random_model_follows_a_trace():
    trace = TracedRouting.load(TRACES / "qwen3_moe.safetensors")
    config = shape() | {"num_experts_per_tok": 4, "num_hidden_layers": 4}
    gpu = GpuRequest(2 * 10**9, True, 1, slots=40 * 13_824)
    loaded = random_language(config, CacheSettings("none"), CPU, context=64, experts=RandomExperts(trace, gpu))
    chosen: list[torch.Tensor] = []
    forward = PooledExperts.forward

    def recorded(self: PooledExperts, inputs: MixtureInput) -> torch.Tensor:
        if len(inputs.x) == 1:
            chosen.append(inputs.scores.topk(4).indices.sort().values[0])
        return forward(self, inputs)

    with patch.object(PooledExperts, "forward", recorded):
        ours = Ours(loaded.scheduler, 1, loaded.experts, trace)
        (speed,) = measure([ours], [6], 256, 5, 1, lambda what: None)
    assert speed.experts is not None
    assert 0 < speed.experts.hit_rate < 1
    # the prompt ends with the last token of the trace, the first ones follow, and their experts are the trace's
    steps = torch.stack(chosen[-5 * 4 :]).view(5, 4, 4)
    assert torch.equal(steps, trace.ids[[-1, 0, 1, 2, 3], :4])


def test_traces_that_do_not_fit():
    trace = TracedRouting.load(TRACES / "qwen3_moe.safetensors")
    for change, message in (
        ({"num_experts_per_tok": 2}, "the trace has 4 experts per token and layer; the shape has 2"),
        ({"num_experts_per_tok": 4, "num_experts": 8}, "the shape has 8 per layer"),
        ({"num_experts_per_tok": 4, "tie_word_embeddings": True}, "tied to the embedding"),
        ({"num_experts_per_tok": 4, "vocab_size": 64}, "the trace has 120 tokens; a width of 128 allows 64"),
    ):
        with pytest.raises(InputError, match=message):
            random_language(shape() | change, CacheSettings("none"), CPU, context=64, experts=RandomExperts(trace))


def test_a_file_that_is_no_trace(tmp_path: Path):
    with pytest.raises(InputError, match="there is no such trace"):
        TracedRouting.load(tmp_path / "missing.safetensors")
    (tmp_path / "text").write_text("no trace")
    with pytest.raises(FormatError, match="is no trace of expert routing"):
        TracedRouting.load(tmp_path / "text")
    save_file({"ids": torch.zeros(3, 2)}, tmp_path / "floats")
    with pytest.raises(FormatError, match="it needs a tensor 'ids'"):
        TracedRouting.load(tmp_path / "floats")
