"""Packed models with offloaded experts give logits bit-identical to models with resident experts."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from auraflux.errors import ExpertError, SettingsError
from auraflux.loading.load import load
from auraflux.models import family
from auraflux.models.config import experts_per_token
from auraflux.ops.simd.isa import ISA
from auraflux.weights.convert.mlx_folder import convert
from auraflux.weights.convert.pack import pack
from auraflux.weights.experts import disk_reader
from auraflux.weights.experts.settings import ExpertSettings, plan_expert_cache
from auraflux.weights.experts.store import ExpertStore
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.loader import Weights
from tests.models.oracles import prefill, save, tokens
from tests.models.test_deepseek_v3 import deepseek
from tests.models.test_gemma4_text import mixture
from tests.models.test_glm4_moe import glm, minimax
from tests.models.test_gpt_oss import gpt_oss
from tests.models.test_nemotron_h import nemotron_h
from tests.models.test_qwen3_5_moe import qwen3_5_moe
from tests.models.test_qwen3_moe import qwen3_moe
from tests.models.test_qwen4_exp import qwen4

MODELS = {"qwen3_5_moe": qwen3_5_moe, "qwen3_moe": qwen3_moe, "deepseek_v3": deepseek, "gpt_oss": gpt_oss}
NEWER = {"glm4_moe": glm, "minimax_m2": minimax, "gemma4": mixture, "nemotron_h": nemotron_h, "qwen4_exp": qwen4}
PROMPT, STEPS, MANY, CHUNK = 40, 20, 80, 16


@cache
def packed(name: str) -> tuple[Path, list[int]]:
    """Return the folder of a tiny packed model, and tokens for it."""
    torch.manual_seed(0)
    folder, source = Path(mkdtemp(prefix="auraflux-packed-")), {**MODELS, **NEWER}[name]()
    checkpoint = open_checkpoint(save(source, folder / "source"))
    kind = family(checkpoint.config)
    convert(checkpoint, kind, folder / "converted", bits=4, group=32)
    pack(open_checkpoint(folder / "converted"), kind, folder / "packed", lanes=ISA.lanes)
    return folder / "packed", tokens(source, PROMPT + STEPS)


def loaded(folder: Path, placement: str, exact: bool = True, kv: str = "k8v4") -> tuple[Engine, ExpertStore]:
    """Return an engine with experts mapped, or with an expert cache of a given size."""
    checkpoint = open_checkpoint(folder)
    module, files = family(checkpoint.config), checkpoint.experts
    assert files is not None
    config, k = module.Config.from_hf(checkpoint.config), experts_per_token(checkpoint.config)
    each = sum(file.stride for file in files.files)
    slots = {"mapped": files.count, "few": k, "half": max(k, files.count // 2), "all": files.count}[placement]
    share = plan_expert_cache(files, k, slots * each, "mapped" if placement == "mapped" else "direct")
    store = ExpertStore(files, share)
    weights = Weights(checkpoint, module.rename, experts=store)
    model = module.Model(config, weights)
    weights.check_loaded()
    options: dict[str, Any] = {"context": 512, "chunk": CHUNK, "exact": exact}
    return Engine(model, module.make_caches(config), CacheSettings(kv), **options), store


def resident(name: str, exact: bool) -> Engine:
    """Return an engine with resident experts, from the folder before packing."""
    folder, _ = packed(name)
    checkpoint = open_checkpoint(folder.parent / "converted")
    module = family(checkpoint.config)
    config = module.Config.from_hf(checkpoint.config)
    weights = Weights(checkpoint, module.rename)
    model = module.Model(config, weights)
    weights.check_loaded()
    options: dict[str, Any] = {"context": 512, "chunk": CHUNK, "exact": exact}
    return Engine(model, module.make_caches(config), CacheSettings("k8v4"), **options)


def run(engine: Engine, ids: list[int]) -> torch.Tensor:
    """Return the logits after the prompt and after every decode step."""
    sequence = engine.cache.open()
    found = [prefill(engine, sequence, ids[:PROMPT])]
    batch = engine.cache.batch([sequence])
    found += [engine.decode(batch, [token])[0] for token in ids[PROMPT:]]
    return torch.stack(found)


def exact_and_fast() -> list:
    """Pair every model with exact and fast arithmetic; the quick tests cover one of the two."""
    quick = dict(zip(MODELS, (True, False, True, False), strict=True))
    pairs = [(name, exact) for name in (*MODELS, *NEWER) for exact in (True, False)]
    return [pytest.param(*pair, marks=[] if quick.get(pair[0]) == pair[1] else pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(("name", "exact"), exact_and_fast())
def test_logits_are_bit_identical_for_every_expert_cache_size(name: str, exact: bool):
    folder, ids = packed(name)
    expected = run(resident(name, exact), ids)
    for placement in ("few", "half", "all", "mapped"):
        engine, store = loaded(folder, placement, exact)
        assert torch.equal(run(engine, ids), expected), placement
        assert (store.cache_stats().total.misses > 0) == (placement != "mapped")


WAYS = [(name, kv, exact) for name in {**MODELS, **NEWER} for kv in ("none", "k8v4", "k4v4", "k3v3") for exact in (True, False)]
QUICK = [("qwen3_moe", "k4v4", False), ("qwen3_5_moe", "none", True)]


@pytest.mark.parametrize(
    ("name", "kv", "exact"), [*QUICK, *(pytest.param(*way, marks=pytest.mark.slow) for way in WAYS if way not in QUICK)]
)
def test_logits_do_not_depend_on_chunk_size_with_offloaded_experts(name: str, kv: str, exact: bool):
    folder, ids = packed(name)
    engine, store = loaded(folder, "few", exact, kv)

    def prefill_in_chunks(size: int) -> torch.Tensor:
        sequence = engine.cache.open()
        batch = engine.cache.batch([sequence])
        found = [engine.compute_logits(engine.step(batch, [ids[at : at + size]])) for at in range(0, len(ids), size)]
        sequence.close()
        return torch.cat(found)

    single_chunk = prefill_in_chunks(len(ids))
    for size in (1, 7, 37):
        assert torch.equal(prefill_in_chunks(size), single_chunk), f"chunks of {size}"
    assert store.cache_stats().total.misses > 0


@pytest.mark.parametrize("name", MODELS)
def test_expert_prefetch_does_not_change_the_output(name: str):
    folder, ids = packed(name)
    few = budget(folder)["few"]
    found = {}
    for prefetch in (False, True):
        model = load(folder, expert_memory=ExpertSettings(few, prefetch=prefetch), context=128, chunk=CHUNK)
        logits = model.logits(ids[:PROMPT])
        generated = list(model.tokens(ids[:PROMPT], max_tokens=STEPS, temperature=0))
        assert model.stats.experts is not None
        found[prefetch] = logits, generated, model.stats.experts.total.prefetched
    assert torch.equal(found[True][0], found[False][0])
    assert found[True][1] == found[False][1]
    assert found[True][2] > 0


def test_long_output_matches_resident_experts():
    folder, ids = packed("qwen3_5_moe")
    each = budget(folder)
    expected = list(load(folder.parent / "converted", context=512).tokens(ids[:PROMPT], max_tokens=MANY, temperature=0))
    model = load(folder, expert_memory=each["few"], context=512)
    assert list(model.tokens(ids[:PROMPT], max_tokens=MANY, temperature=0)) == expected
    assert len(expected) == MANY
    assert model.stats.experts is not None
    total, layers = model.stats.experts.total, model.stats.experts.layers
    assert total.misses > 0
    assert total.misses == sum(layer.misses for layer in layers.values())
    assert list(layers) == [f"model.layers.{index}.mlp" for index in range(4)]


def budget(folder: Path) -> dict[str, int]:
    """Return the expert cache sizes in bytes: one token's experts of every layer, and all experts."""
    checkpoint = open_checkpoint(folder)
    assert checkpoint.experts is not None
    each = sum(file.stride for file in checkpoint.experts.files)
    return {"few": experts_per_token(checkpoint.config) * each, "all": checkpoint.experts.nbytes}


def test_batched_output_matches_resident_experts():
    folder, ids = packed("qwen3_moe")
    prompts = [ids[:9], ids[9:30], ids[30:33]]
    found = [
        load(path, expert_memory=memory, context=128, quantize=None).generate_batch(prompts, max_tokens=12, temperature=0)
        for path, memory in ((folder.parent / "converted", None), (folder, budget(folder)["few"]))
    ]
    assert found[0] == found[1]


def test_model_recovers_from_a_failed_expert_read(monkeypatch: pytest.MonkeyPatch):
    folder, ids = packed("qwen3_moe")
    model = load(folder, expert_memory=budget(folder)["few"], context=128)
    expected = list(model.tokens(ids[:9], max_tokens=8, temperature=0))
    model.reset()
    calls = 0

    def fails(self: Any, read: Any, start: int, stop: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 12:
            read.fail("gives an error (on purpose)")
        else:
            real(self, read, start, stop)

    real = disk_reader._ReadQueue._read
    monkeypatch.setattr(disk_reader._ReadQueue, "_read", fails)
    with pytest.raises(ExpertError, match=r"expert \d of model\.layers\.\d\.mlp cannot be read: .*\(on purpose\)"):
        list(model.tokens(ids[:9], max_tokens=8, temperature=0))
    assert list(model.tokens(ids[:9], max_tokens=8, temperature=0)) == expected


def test_invalid_expert_memory_is_refused():
    folder, _ = packed("qwen3_moe")
    few = budget(folder)["few"]
    with pytest.raises(SettingsError, match=f"a token uses 3. The minimum is {few} bytes"):
        load(folder, expert_memory=few - 1)
    with pytest.raises(SettingsError, match=r"is not packed, .* run 'auraflux pack' on it first"):
        load(folder.parent / "converted", expert_memory="4GB")
    with pytest.raises(SettingsError, match="'much' is not a size"):
        load(folder, expert_memory="much")


def test_experts_that_fit_in_memory_are_mapped_and_use_graphs():
    folder, ids = packed("qwen3_moe")
    model = load(folder, context=128)
    assert model.experts is not None
    assert model.experts.plan.mapped
    list(model.tokens(ids[:9], max_tokens=8, temperature=0))
    assert model.engine.graphs.refused is None
    assert model.stats.experts is None
    direct = load(folder, expert_memory=ExpertSettings(budget(folder)["all"] * 2, "direct"), context=128)
    assert direct.experts is not None
    assert not direct.experts.plan.mapped
