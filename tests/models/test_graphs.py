"""Graph replays of decode steps match eager steps in every family."""

from pathlib import Path
from typing import Any

import pytest
import torch

from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from auraflux.models import family
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.loader import Weights
from tests.models.oracles import prefill, save, tokens
from tests.models.test_afmoe import afmoe, muse
from tests.models.test_deepseek_v3 import deepseek, mistral4
from tests.models.test_deepseek_v32 import deepseek as deepseek_v32
from tests.models.test_deepseek_v32 import glm_shared
from tests.models.test_gemma3_text import gemma
from tests.models.test_gemma4_text import mixture, small_gemma4
from tests.models.test_glm4_moe import glm, minimax
from tests.models.test_gpt_oss import gpt_oss
from tests.models.test_hy_v4 import hunyuan4
from tests.models.test_kimi_linear import kimi_linear
from tests.models.test_laguna import laguna
from tests.models.test_llama import llama, qwen2
from tests.models.test_nemotron_h import nemotron_h
from tests.models.test_qwen3_5_moe import qwen3_5_moe
from tests.models.test_qwen3_moe import qwen3_moe
from tests.models.test_qwen4_exp import qwen4

MODELS = {"llama": llama, "qwen2": qwen2, "qwen3_moe": qwen3_moe, "qwen3_5_moe": qwen3_5_moe, "gpt_oss": gpt_oss}
MODELS |= {"deepseek_v3": deepseek, "gemma3": gemma}
NEWER = {"glm4_moe": glm, "minimax_m2": minimax, "mistral4": mistral4, "gemma4": small_gemma4, "gemma4_moe": mixture}
NEWER |= {"afmoe": afmoe, "laguna": laguna}
NEWER |= {"kimi_linear": kimi_linear, "nemotron_h": nemotron_h}
MODELS |= NEWER
# on a GPU some of their ops fall back to the reference, so steps are not captured
UNCAPTURED = {"deepseek_v32": deepseek_v32, "glm_moe_dsa": glm_shared, "hy_v4": hunyuan4}
# rows are read from disk during a step; torch caps logits
WITHOUT_GRAPHS = {"qwen4_exp": qwen4, "muse_glimmer": muse}
ALL = MODELS | UNCAPTURED | WITHOUT_GRAPHS
# KV cache settings in the quick tests
QUICK = {"llama": ("none", "k8v4"), "qwen2": ("k8v4",), "qwen3_moe": ("none",), "qwen3_5_moe": ("k8v4",), "gpt_oss": ("k8v4",)}
QUICK |= {"deepseek_v3": ("k8v4",), "gemma3": ("none",)}
PROMPT, STEPS = 50, 90  # past two pages, and past the length buckets of 64 and 128 tokens


def engines(folder: Path, kv: str, bits: int | None = 4) -> dict[bool, Engine]:
    checkpoint = open_checkpoint(folder)
    module = family(checkpoint.config)
    config = module.Config.from_hf(checkpoint.config)
    weights = Weights(checkpoint, module.rename, bits=bits, group=32)
    model, shapes = module.Model(config, weights), module.make_caches(config)
    weights.check_loaded()
    options: dict[str, Any] = {"context": 256, "sequences": 2}
    return {graphs: Engine(model, shapes, CacheSettings(kv), graphs=graphs, **options) for graphs in (True, False)}


def named_caches() -> list:
    pairs = [(name, kv) for name in ALL for kv in ("none", "k8v4")]
    return [pytest.param(*pair, marks=[] if pair[1] in QUICK.get(pair[0], ()) else pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_steps_of_dense_folders_are_replayed(name: str, dtype: torch.dtype, tmp_path: Path):
    torch.manual_seed(0)
    source = ALL[name]().to(dtype)
    ids, found = tokens(source, 20), {}
    for graphs, engine in engines(save(source, tmp_path), "none", bits=None).items():
        sequence = engine.cache.open()
        prefill(engine, sequence, ids[:10])
        batch = engine.cache.batch([sequence])
        found[graphs] = torch.stack([engine.decode(batch, [token]) for token in ids[10:]])
        assert (engine.graphs.refused is None) == graphs, engine.graphs.refused
    assert torch.equal(found[True], found[False])


@pytest.mark.parametrize(("name", "kv"), named_caches())
def test_graph_replay_matches_eager_decode(name: str, kv: str, tmp_path: Path):
    torch.manual_seed(0)
    source = ALL[name]()
    ids = tokens(source, PROMPT + STEPS)
    found = {}
    for graphs, engine in engines(save(source, tmp_path), kv).items():
        pair = [engine.cache.open(), engine.cache.open()]
        for sequence, length in zip(pair, (PROMPT, 7), strict=True):
            prefill(engine, sequence, ids[:length])
        batch = engine.cache.batch(pair)
        found[graphs] = torch.stack([engine.decode(batch, [token, token // 2]) for token in ids[PROMPT:]])
        assert (engine.graphs.refused is None) == (graphs and name not in WITHOUT_GRAPHS), engine.graphs.refused
    assert torch.equal(found[True], found[False])
