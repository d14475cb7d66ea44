"""The profile of a step: kernel time by op."""

import pytest
import torch

from auraflux.bench.profile import OTHER, divide, kernels_per_layer, profile_step
from auraflux.bench.random_weights import random_model
from auraflux.bench.shapes import MAIN_SHAPES, shape_of
from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from auraflux.errors import InputError

SMALL = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2}


def test_kernel_time_is_attributed_to_the_launching_op():
    def op(name: str, ts: float, dur: float) -> dict:
        return {"cat": "user_annotation", "name": f"op {name}", "ts": ts, "dur": dur}

    def launch(number: int, ts: float, kind: str = "cuda_driver") -> dict:
        return {"cat": kind, "name": "launch", "ts": ts, "args": {"correlation": number}}

    def kernel(number: int, dur: float) -> dict:
        return {"cat": "kernel", "name": "k", "ts": 1000.0, "dur": dur, "args": {"correlation": number}}

    events = [op("rope", 10, 5), op("linear", 20, 5), op("linear", 30, 5), {"cat": "gpu_user_annotation", "name": "op rope"}]
    events += [launch(1, 12), launch(2, 21), launch(3, 33), launch(4, 34, "cuda_runtime"), launch(5, 27)]
    events += [kernel(1, 3.0), kernel(2, 4.0), kernel(3, 5.0), kernel(4, 6.0), kernel(5, 7.0)]
    costs = divide(events)
    assert {name: (cost.calls, cost.kernels) for name, cost in costs.items()} == {
        "rope": (1, 1),
        "linear": (2, 3),
        OTHER: (0, 1),
    }
    assert costs["linear"].seconds == pytest.approx(15e-6)
    assert kernels_per_layer(costs, 2) == 2.5


@pytest.mark.parametrize("name", MAIN_SHAPES)
def test_a_shape_gets_random_weights_and_runs(name: str):
    config = shape_of(name, 2) | SMALL | ({"full_attention_interval": 2} if "3.6" in name else {})
    config |= {key: 8 for key in ("num_experts", "n_routed_experts") if key in config}
    config |= {
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "head_dim": 64,
        "n_group": 2,
        "topk_group": 1,
    }
    config |= {"num_experts_per_tok": 2, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
    model, shapes = random_model(config, 4, 64, torch.float32, torch.device("cpu"))
    engine = Engine(model, shapes, CacheSettings("none"), context=64)
    sequence = engine.cache.open()
    scores = engine.all_logits(sequence, list(range(20)))[-1]
    assert scores.isfinite().all()
    assert scores.std() > 0.1
    costs = profile_step(engine, engine.cache.batch([sequence]), [1])
    assert costs["linear"].calls > 0
    assert all(cost.seconds >= 0 for cost in costs.values())


def test_an_unknown_shape_is_refused():
    with pytest.raises(InputError, match="Those there are: qwen3-30b-a3b"):
        shape_of("gpt-5")
