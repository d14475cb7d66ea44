"""Packed models whose experts are read as they are chosen say what they say with all experts in memory, to the bit."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from auraflux.cache import CacheSettings
from auraflux.errors import ExpertError, SettingsError
from auraflux.models import family
from auraflux.models.config import experts_per_token
from auraflux.ops.simd.isa import ISA
from auraflux.run.engine import Engine
from auraflux.run.load import load
from auraflux.weights import reader
from auraflux.weights.checkpoint import open_checkpoint
from auraflux.weights.convert import convert
from auraflux.weights.expert_settings import ExpertSettings, share_out
from auraflux.weights.expert_store import ExpertStore
from auraflux.weights.loader import Weights
from auraflux.weights.pack import pack
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
LATER = {"glm4_moe": glm, "minimax_m2": minimax, "gemma4": mixture, "nemotron_h": nemotron_h, "qwen4_exp": qwen4}
PROMPT, STEPS, MANY, CHUNK = 40, 20, 80, 16


@cache
def packed(name: str) -> tuple[Path, list[int]]:
    """The folder of a tiny packed model, and a text for it."""
    torch.manual_seed(0)
    folder, source = Path(mkdtemp(prefix="auraflux-packed-")), {**MODELS, **LATER}[name]()
    checkpoint = open_checkpoint(save(source, folder / "source"))
    kind = family(checkpoint.config)
    convert(checkpoint, kind, folder / "whole", bits=4, group=32)
    pack(open_checkpoint(folder / "whole"), kind, folder / "packed", lanes=ISA.lanes)
    return folder / "packed", tokens(source, PROMPT + STEPS)


def loaded(folder: Path, kept: str, exact: bool = True, kv: str = "k8v4") -> tuple[Engine, ExpertStore]:
    """An engine whose experts are kept in some way: all in memory, mapped, or so many of each layer."""
    checkpoint = open_checkpoint(folder)
    module, files = family(checkpoint.config), checkpoint.experts
    assert files is not None
    config, k = module.Config.from_hf(checkpoint.config), experts_per_token(checkpoint.config)
    each = sum(file.stride for file in files.files)
    slots = {"mapped": files.count, "few": k, "half": max(k, files.count // 2), "all": files.count}[kept]
    share = share_out(files, k, slots * each, "mapped" if kept == "mapped" else "direct")
    store = ExpertStore(files, share)
    weights = Weights(checkpoint, module.rename, experts=store)
    model = module.Model(config, weights)
    weights.done()
    options: dict[str, Any] = {"context": 512, "chunk": CHUNK, "exact": exact}
    return Engine(model, module.make_caches(config), CacheSettings(kv), **options), store


def resident(name: str, exact: bool) -> Engine:
    """The same model from the folder it was packed from."""
    folder, _ = packed(name)
    checkpoint = open_checkpoint(folder.parent / "whole")
    module = family(checkpoint.config)
    config = module.Config.from_hf(checkpoint.config)
    weights = Weights(checkpoint, module.rename)
    model = module.Model(config, weights)
    weights.done()
    options: dict[str, Any] = {"context": 512, "chunk": CHUNK, "exact": exact}
    return Engine(model, module.make_caches(config), CacheSettings("k8v4"), **options)


def run(engine: Engine, text: list[int]) -> torch.Tensor:
    """Scores after the prompt and after every token that follows."""
    sequence = engine.cache.open()
    found = [prefill(engine, sequence, text[:PROMPT])]
    batch = engine.cache.batch([sequence])
    found += [engine.decode(batch, [token])[0] for token in text[PROMPT:]]
    return torch.stack(found)


def both_contracts() -> list:
    """Every model under both contracts, of which the quick tests hold each model to one."""
    quick = dict(zip(MODELS, (True, False, True, False), strict=True))
    pairs = [(name, exact) for name in (*MODELS, *LATER) for exact in (True, False)]
    return [pytest.param(*pair, marks=[] if quick.get(pair[0]) == pair[1] else pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(("name", "exact"), both_contracts())
def test_what_is_held_does_not_change_a_bit(name: str, exact: bool):
    folder, text = packed(name)
    wanted = run(resident(name, exact), text)
    for kept in ("few", "half", "all", "mapped"):
        engine, store = loaded(folder, kept, exact)
        assert torch.equal(run(engine, text), wanted), kept
        assert (store.traffic().total.misses > 0) == (kept != "mapped")


WAYS = [(name, kv, exact) for name in {**MODELS, **LATER} for kv in ("none", "k8v4", "k4v4", "k3v3") for exact in (True, False)]
QUICK = [("qwen3_moe", "k4v4", False), ("qwen3_5_moe", "none", True)]


@pytest.mark.parametrize(
    ("name", "kv", "exact"), [*QUICK, *(pytest.param(*way, marks=pytest.mark.slow) for way in WAYS if way not in QUICK)]
)
def test_pieces_change_nothing_while_experts_come_from_disk(name: str, kv: str, exact: bool):
    folder, text = packed(name)
    engine, store = loaded(folder, "few", exact, kv)

    def read(size: int) -> torch.Tensor:
        sequence = engine.cache.open()
        batch = engine.cache.batch([sequence])
        found = [engine.score(engine.step(batch, [text[at : at + size]])) for at in range(0, len(text), size)]
        sequence.close()
        return torch.cat(found)

    whole = read(len(text))
    for size in (1, 7, 37):
        assert torch.equal(read(size), whole), f"pieces of {size}"
    assert store.traffic().total.misses > 0


@pytest.mark.parametrize("name", MODELS)
def test_reading_what_a_router_run_early_chooses_does_not_change_a_bit(name: str):
    folder, text = packed(name)
    few = budget(folder)["few"]
    found = {}
    for guess in (False, True):
        model = load(folder, expert_memory=ExpertSettings(few, guess=guess), context=128, chunk=CHUNK)
        scores = model.logits(text[:PROMPT])
        written = list(model.tokens(text[:PROMPT], max_tokens=STEPS, temperature=0))
        assert model.stats.experts is not None
        found[guess] = scores, written, model.stats.experts.total.ahead
    assert torch.equal(found[True][0], found[False][0])
    assert found[True][1] == found[False][1]
    assert found[True][2] > 0


def test_many_tokens_are_the_same():
    folder, text = packed("qwen3_5_moe")
    each = budget(folder)
    wanted = list(load(folder.parent / "whole", context=512).tokens(text[:PROMPT], max_tokens=MANY, temperature=0))
    model = load(folder, expert_memory=each["few"], context=512)
    assert list(model.tokens(text[:PROMPT], max_tokens=MANY, temperature=0)) == wanted
    assert len(wanted) == MANY
    assert model.stats.experts is not None
    total, layers = model.stats.experts.total, model.stats.experts.layers
    assert total.misses > 0
    assert total.misses == sum(layer.misses for layer in layers.values())
    assert list(layers) == [f"model.layers.{index}.mlp" for index in range(4)]


def budget(folder: Path) -> dict[str, int]:
    """Bytes that hold a token's experts, and all of them."""
    checkpoint = open_checkpoint(folder)
    assert checkpoint.experts is not None
    each = sum(file.stride for file in checkpoint.experts.files)
    return {"few": experts_per_token(checkpoint.config) * each, "all": checkpoint.experts.nbytes}


def test_several_texts_together_are_the_same():
    folder, text = packed("qwen3_moe")
    prompts = [text[:9], text[9:30], text[30:33]]
    found = [
        load(path, expert_memory=memory, context=128, quantize=None).generate_batch(prompts, max_tokens=12, temperature=0)
        for path, memory in ((folder.parent / "whole", None), (folder, budget(folder)["few"]))
    ]
    assert found[0] == found[1]


def test_a_model_survives_an_expert_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch):
    folder, text = packed("qwen3_moe")
    model = load(folder, expert_memory=budget(folder)["few"], context=128)
    wanted = list(model.tokens(text[:9], max_tokens=8, temperature=0))
    model.reset()
    calls = 0

    def fails(self: Any, read: Any, start: int, stop: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 12:
            read.fail("gives an error (on purpose)")
        else:
            real(self, read, start, stop)

    real = reader._Desk._read
    monkeypatch.setattr(reader._Desk, "_read", fails)
    with pytest.raises(ExpertError, match=r"expert \d of model\.layers\.\d\.mlp cannot be read: .*\(on purpose\)"):
        list(model.tokens(text[:9], max_tokens=8, temperature=0))
    assert list(model.tokens(text[:9], max_tokens=8, temperature=0)) == wanted


def test_budgets_that_cannot_be_are_refused():
    folder, _ = packed("qwen3_moe")
    few = budget(folder)["few"]
    with pytest.raises(SettingsError, match=f"a token uses 3. The least that works is {few} bytes"):
        load(folder, expert_memory=few - 1)
    with pytest.raises(SettingsError, match=r"is not packed, .* run 'auraflux pack' on it first"):
        load(folder.parent / "whole", expert_memory="4GB")
    with pytest.raises(SettingsError, match="'much' is not a size"):
        load(folder, expert_memory="much")


def test_what_fits_is_mapped_and_replayed():
    folder, text = packed("qwen3_moe")
    model = load(folder, context=128)
    assert model.experts is not None
    assert model.experts.share.mapped
    list(model.tokens(text[:9], max_tokens=8, temperature=0))
    assert model.engine.replayer.refused is None
    assert model.stats.experts is None
    direct = load(folder, expert_memory=ExpertSettings(budget(folder)["all"] * 2, "direct"), context=128)
    assert direct.experts is not None
    assert not direct.experts.share.mapped
