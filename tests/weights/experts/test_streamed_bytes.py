"""Bytes that a token reads from disk of a mixture in IQ2_XXS: those that its experts have in the GGUF file."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from auraflux.models import family
from auraflux.weights.experts.settings import ExpertSettings, plan_expert_cache
from auraflux.weights.experts.store import ExpertStore
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.loader import Weights
from tests.weights.experts.packed_folders import packed

HIDDEN, INNER, COUNT, K, LAYERS, VOCAB = 2048, 512, 12, 8, 2, 256
BLOCK_NBYTES = 66  # of 256 weights
EXPERT_NBYTES = 3 * HIDDEN * INNER // 256 * BLOCK_NBYTES
NUMBERS = {
    "block_count": LAYERS,
    "context_length": 256,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": 4,
    "attention.head_count_kv": 1,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "expert_count": COUNT,
    "expert_used_count": K,
    "expert_feed_forward_length": INNER,
}


def mixture(path: Path) -> Path:
    """Write a mixture with random blocks."""
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "qwen3moe")
    for key, value in NUMBERS.items():
        writer.add_uint32(f"qwen3moe.{key}", value)
    writer.add_float32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6)

    def dense(name: str, *shape: int, spread: float = 0.02) -> None:
        values = rng.standard_normal(shape) * spread if len(shape) > 1 else np.ones(shape)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    def experts(name: str, rows: int, width: int) -> None:
        blocks = rng.integers(0, 256, (COUNT, rows, width // 256, BLOCK_NBYTES), dtype=np.uint8)
        blocks[..., :2] = np.array([0.004], np.float16).view(np.uint8)
        kind = gguf.GGMLQuantizationType.IQ2_XXS
        writer.add_tensor(f"{name}.weight", blocks.reshape(COUNT, rows, -1), raw_dtype=kind)

    dense("token_embd", VOCAB, HIDDEN)
    dense("output_norm", HIDDEN)
    for layer in (f"blk.{index}." for index in range(LAYERS)):
        for name, width in {"attn_norm": HIDDEN, "ffn_norm": HIDDEN, "attn_q_norm": 64, "attn_k_norm": 64}.items():
            dense(layer + name, width)
        for name, rows, width in (("q", 256, HIDDEN), ("k", 64, HIDDEN), ("v", 64, HIDDEN), ("output", HIDDEN, 256)):
            dense(f"{layer}attn_{name}", rows, width)
        dense(f"{layer}ffn_gate_inp", COUNT, HIDDEN, spread=0.3)
        for name in ("gate", "up"):
            experts(f"{layer}ffn_{name}_exps", INNER, HIDDEN)
        experts(f"{layer}ffn_down_exps", HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.slow
def test_a_token_reads_the_bytes_of_its_experts_in_the_file(tmp_path: Path):
    checkpoint = open_checkpoint(packed(mixture(tmp_path / "m.gguf"), tmp_path / "packed"))
    module, files = family(checkpoint.config), checkpoint.experts
    assert files is not None
    least = plan_expert_cache(files, K, 1 << 40, "mapped").min_nbytes
    store = ExpertStore(files, plan_expert_cache(files, K, least, "direct"), ExpertSettings(prefetch=False, io="direct"))
    config = module.Config.from_hf(checkpoint.config)
    model = module.Model(config, Weights(checkpoint, module.rename, experts=store))
    engine = Engine(model, module.make_caches(config), CacheSettings("none"), context=64)
    sequence = engine.cache.open()
    for token in range(8):
        engine.all_logits(sequence, [37 * token % VOCAB])
    found = store.cache_stats().total
    assert found.hits + found.misses == 8 * LAYERS * K
    assert found.misses >= LAYERS * K
    assert found.nbytes == pytest.approx(found.misses * EXPERT_NBYTES, rel=0.05)
