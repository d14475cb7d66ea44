"""Shapes of real models: their families accept the configs, and parameter counts match the names."""

import pytest
import torch

from auraflux.bench.random_weights import Outlines
from auraflux.bench.shapes import MAIN_SHAPES, shape_names, shape_of
from auraflux.errors import InputError
from auraflux.models import family
from auraflux.quant import QTensor

BILLIONS = {
    "qwen3-30b-a3b": 30.5,
    "qwen3.6-35b-a3b": 34.7,
    "llama-8b": 8.0,
    "qwen3.8-27b": 26.9,
    "glm-4.5-air": 106.9,
    "glm-4.6": 352.8,
    "qwen3-235b-a22b": 235.1,
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
    """Fake weights that count their parameters."""

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


def test_every_shape_can_be_truncated():
    for name in shape_names():
        config = shape_of(name, 4)
        assert family(config).Config.from_hf(config).layers == 4


def test_main_shapes_are_listed_first():
    names = shape_names()
    assert tuple(names[: len(MAIN_SHAPES)]) == MAIN_SHAPES
    assert len(set(names)) == len(names) == 23


def test_an_unknown_shape_lists_the_known_ones():
    for name in ("gpt-9", "../shapes/llama-8b", ""):
        with pytest.raises(InputError, match=r"^there is no shape .* Those there are: qwen3-30b-a3b, .*qwen4-exp\.$"):
            shape_of(name)


def test_a_shape_is_a_copy():
    shape_of("llama-8b")["hidden_size"] = 1
    assert shape_of("llama-8b")["hidden_size"] == 4096
