"""Memory plans compared with loaded models and full caches."""

import pytest

from auraflux.cache import AttentionShape, Cache, CacheSettings, LatentShape, RecurrentShape
from auraflux.engine.engine import nbytes as model_nbytes
from auraflux.models import family
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.loader import Weights
from auraflux.weights.memory_plan import cache_nbytes, cache_table, contexts, plan_memory
from tests.weights.formats.gguf_files import HIDDEN, INNER, LAYERS, VOCAB, llama_tensors, write_gguf

SHAPES = {
    "full": AttentionShape(2, 64),
    "window": AttentionShape(2, 64, window=100),
    "latent": LatentShape(128, 32),
    "recurrent": RecurrentShape(96, 4, 32, 32),
}


@pytest.mark.parametrize("kv", ["none", "k8v4", "k3v3"])
@pytest.mark.parametrize("kind", SHAPES)
def test_cache_bytes_match_a_full_cache(kind: str, kv: str):
    context = 1000
    shapes = [SHAPES[kind], SHAPES["full"]]
    cache = Cache(shapes, CacheSettings(kv=kv).for_device("cpu"), context=context)
    batch = cache.batch([cache.open()])
    for _ in range(2):
        batch.extend([context // 2])
    planned = cache_nbytes(shapes, kv, context)
    assert cache.nbytes <= planned
    # sliding windows and the full-precision recent window reserve room for a checkpoint and for the tokens of a step
    assert planned <= cache.nbytes * (2 if kind == "window" else 1 if kv == "none" else 1.2)


def test_windows_and_recurrent_states_do_not_grow():
    for kind in ("window", "recurrent"):
        assert cache_nbytes([SHAPES[kind]], "none", 1 << 17) == cache_nbytes([SHAPES[kind]], "none", 1 << 20)
    assert cache_nbytes([SHAPES["full"]], "none", 8192) == 2 * cache_nbytes([SHAPES["full"]], "none", 4096)


def test_unsupported_kv_setting_gives_a_reason():
    table = cache_table([AttentionShape(2, 64, value_width=32)], [4096])
    assert isinstance(table["none"], dict)
    assert "its keys have width 64 and its values 32" in str(table["k8v4"])


def test_contexts_are_limited_by_the_model():
    assert contexts(2048) == [2048]
    assert contexts(8192) == [4096, 8192]
    assert contexts(32768) == [4096, 32768]
    assert contexts(1 << 20) == [4096, 32768, 131072]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "MXFP4"])
def test_memory_matches_a_loaded_model(kind: str, tmp_path):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", llama_tensors(), kind))
    module = family(checkpoint.config)
    weights = Weights(checkpoint, module.rename)
    model = module.Model(module.Config.from_hf(checkpoint.config), weights)
    found = plan_memory(checkpoint, module.rename)
    assert found.total.nbytes == sum(checkpoint.sizes().values())
    # the model also has rotary frequencies
    assert 0 <= model_nbytes(model) - found.total.memory_nbytes <= 1024


def test_totals_add_up(tmp_path):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", llama_tensors(tied=False), "Q8_0"))
    found = plan_memory(checkpoint, lambda name: None if name == "lm_head.weight" else name)
    assert {name: share.tensors for name, share in found.kinds.items()} == {
        "embeddings": 1,
        "norms": 1 + 2 * LAYERS,
        "attention": 4 * LAYERS,
        "mlp": 3 * LAYERS,
    }
    assert found.kinds["mlp"].parameters == 3 * LAYERS * HIDDEN * INNER
    assert found.unused.parameters == VOCAB * HIDDEN
    assert set(found.formats) == {"Q8_0", "F32"}
    for shares in (found.kinds, found.formats):
        assert sum(share.parameters for share in shares.values()) == found.total.parameters
        assert sum(share.memory_nbytes for share in shares.values()) == found.total.memory_nbytes


def test_quantization_at_load_is_counted(tmp_path):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", llama_tensors(), "F32"))
    module = family(checkpoint.config)
    weights = Weights(checkpoint, module.rename, bits=4)
    model = module.Model(module.Config.from_hf(checkpoint.config), weights)
    assert 0 <= model_nbytes(model) - plan_memory(checkpoint, module.rename, bits=4).total.memory_nbytes <= 1024


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.3.mlp.switch_mlp.up_proj.weight", "experts"),
        ("model.layers.3.mlp.experts.17.up_proj.weight", "experts"),
        ("model.layers.3.mlp.shared_expert.up_proj.weight", "shared experts"),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", "shared experts"),
        ("model.layers.3.mlp.shared_expert_gate.weight", "routers"),
        ("model.layers.3.mlp.gate.weight", "routers"),
        ("model.layers.3.mlp.router.bias", "routers"),
        ("model.layers.3.mlp.gate_proj.weight", "mlp"),
        ("model.layers.3.linear_attn.in_proj_qkv.weight", "recurrent"),
        ("model.layers.3.self_attn.sinks", "attention"),
        ("model.layers.3.self_attn.kv_a_layernorm.weight", "norms"),
        ("something.else", "other"),
    ],
)
def test_part_of_tensor_names(name: str, kind: str):
    from auraflux.weights.memory_plan import part_of

    assert part_of(name) == kind


def test_planning_allocates_nothing():
    shapes = [AttentionShape(128, 256)] * 100
    assert cache_nbytes(shapes, "none", 1 << 17) == 100 * 128 * 256 * 2 * 4 * (1 << 17)
