"""Shapes of real models: what they say is read by their families, and makes as many parameters as their names promise."""

import pytest
import torch

from auraflux.bench.more_shapes import MORE_SHAPES
from auraflux.bench.random_weights import Outlines
from auraflux.bench.shapes import SHAPES, shape_of
from auraflux.models import family
from auraflux.quant import QTensor

BILLIONS = {
    "qwen3-30b-a3b": 30.5,
    "qwen3.6-35b-a3b": 34.7,
    "llama-8b": 8.0,
    "qwen3.8-27b": 26.9,
    "glm-4.5-air": 106.9,
    "minimax-m2": 228.7,
    "deepseek-v4-flash": 284.0,
    "glm-4.7-flash": 29.9,
    "kimi-linear-48b-a3b": 49.1,
    "nemotron-3-nano-30b-a3b": 31.6,
    "qwen4-exp": 67.4,
    "mistral-small-4": 118.0,
    "ernie-4.5-21b-a3b": 21.9,
    "ministral-3-8b": 8.5,
    "gemma-4-31b": 30.7,
    "gemma-4-26b-a4b": 25.2,
    "gemma-4-e2b": 4.6,
}


class Counted(Outlines):
    """Weights without memory that are counted as they are asked for."""

    count = 0

    def _take(self, name, shape, index=None):
        made = super()._take(name, shape, index)
        self.count += torch.Size(made.shape).numel()
        return made

    def stack(self, name, count, source):
        before = self.count
        made = super().stack(name, count, source)
        self.count = before + torch.Size(made.shape).numel()
        assert isinstance(made, QTensor | torch.Tensor)
        return made


QUICK = "gemma-4-e2b", "gemma-4-26b-a4b"


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BILLIONS])
def test_a_shape_has_as_many_parameters_as_its_model(name: str):
    config = shape_of(name)
    module, weights = family(config), Counted(4, 32, "cpu")
    made = module.Config.from_hf(config)
    module.Model(made, weights)
    assert weights.count / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)
    assert len(module.make_caches(made)) <= made.layers


def test_every_shape_may_have_fewer_layers():
    for name in SHAPES | MORE_SHAPES:
        config = shape_of(name, 4)
        assert family(config).Config.from_hf(config).layers == 4
