"""Prefill chunks are padded to bucket sizes: padding changes neither logits nor caches."""

import gc
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from auraflux.cache import Batch, Cache, CacheSettings, RecurrentShape
from auraflux.engine.engine import Engine
from auraflux.engine.graph_runner import GraphRunner
from tests.models.oracles import error, prefill, save, tokens
from tests.models.test_gpu import engine_for, use_every_expert
from tests.models.test_graphs import ALL, MODELS, engines, named_caches
from tests.models.test_qwen3_5_moe import qwen3_5_moe

CHUNKS = 45, 3, 70, 1, 33  # tokens
SIZES = [64, 32, 128, None, 64]  # of the padded steps; a single token is not padded


def run_logits(engine: Engine, ids: list[int]) -> Tensor:
    """Return the logits after consecutive prefill chunks and after a few decode steps."""
    sequence, logits, at = engine.cache.open(), [], 0
    for count in CHUNKS:
        logits.append(prefill(engine, sequence, ids[at : at + count]))
        at += count
        assert sequence.length == at
    batch = engine.cache.batch([sequence])
    return torch.stack([*logits, *(engine.decode(batch, [token])[0] for token in ids[at:])])


@pytest.mark.parametrize(("name", "kv"), named_caches())
def test_padding_does_not_change_the_logits(name: str, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    source = ALL[name]()
    engine, ids = engines(save(source, tmp_path), kv)[False], tokens(source, sum(CHUNKS) + 3)
    engine.runner.exact = True
    plain = run_logits(engine, ids)
    sizes = []
    padded_size = Engine._padded_size

    def noted(self, batch, counts):
        sizes.append(padded_size(self, batch, counts))
        return sizes[-1]

    monkeypatch.setattr(Engine, "_padded_size", noted)
    monkeypatch.setattr(GraphRunner, "supports_prefill", True)
    assert error(run_logits(engine, ids), plain) < (1e-5 if kv == "none" else 1e-3)
    assert sizes == SIZES


WIDE = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}  # head widths with dedicated kernels
ON_GPU = {**MODELS, "wide_heads": lambda: qwen3_5_moe(**WIDE)}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "kv"), [("qwen3_moe", "k8v4"), *product(["qwen3_5_moe", "wide_heads", "gpt_oss"], ["none", "k8v4"])]
)
def test_prefill_graphs_match_eager_prefill(name: str, kv: str, tmp_path: Path):
    torch.manual_seed(0)
    source = ON_GPU[name]()
    folder, ids = save(source, tmp_path), tokens(source, 300)
    # replayed with other tokens, with fewer, and with a full step
    prompts = [ids[:200]] * 3 + [ids[100:300], ids[:150], ids[:256], ids[44:300]]
    prompts += [ids[:30]] * 2 + [ids[:20], ids[9:41], ids[:3], ids[:2]]
    found = {}
    for graphs in (True, False):
        engine = engine_for(folder, kv, "cuda", torch.bfloat16, bits=4, context=640, chunk=256, graphs=graphs)
        logits = []
        for number, prompt in enumerate(prompts):
            # recurrent states alternate between two slots
            other = engine.cache.open() if number % 2 else None
            sequence = engine.cache.open()
            logits.append(prefill(engine, sequence, prompt))
            logits.append(engine.decode(engine.cache.batch([sequence]), [7])[0])
            # a second chunk of the same size is a replay too
            logits.append(prefill(engine, sequence, prompt[::-1]))
            logits.append(engine.decode(engine.cache.batch([sequence]), [8])[0])
            sequence.close()
            if other is not None:
                other.close()
        found[graphs] = torch.stack(logits)
        steps = engine.graphs._steps.values()
        recorded = {len(step.ids) for step in steps if step.recording and len(step.ids) > 1}
        assert recorded == ({32, 256} if graphs else set()), engine.graphs.prefill_refused
    assert torch.equal(found[True], found[False])


@pytest.mark.gpu
def test_garbage_collecting_an_engine_does_not_break_capture_in_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    source = MODELS["qwen3_moe"]()
    folder, ids = save(source, tmp_path), tokens(source, 64)
    engines = [engine_for(folder, "none", "cuda", torch.bfloat16, bits=4, sequences=3) for _ in range(2)]
    for engine in engines[:1] * 3 + engines[1:]:
        prefill(engine, engine.cache.open(), ids)
    assert any(step.recording for step in engines.pop(0).graphs._steps.values())
    forward = engine.runner.forward

    def collecting(flat: Tensor, batch: Batch) -> Tensor:
        if gc.isenabled():
            gc.collect()
        return forward(flat, batch)

    monkeypatch.setattr(engine.runner, "forward", collecting)
    prefill(engine, engine.cache.open(), ids)
    assert engine.graphs.prefill_refused is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3_5_moe", "wide_heads"])
def test_padding_does_not_change_the_logits_on_gpu(name: str, tmp_path: Path):
    torch.manual_seed(0)
    source = ON_GPU[name]()
    use_every_expert(source.config.get_text_config())
    folder, ids = save(source, tmp_path), tokens(source, sum(CHUNKS) + 3)
    engine = engine_for(folder, "none", "cuda", torch.bfloat16)
    padded = run_logits(engine, ids)
    engine.graphs.prefill_refused = "no padding"
    assert error(padded, run_logits(engine, ids)) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "size"), [(2, 32), (3, 32), (17, 32), (40, 64), (65, 128), (700, 768), (1000, 1024)])
def test_padding_does_not_change_the_recurrent_state(tokens: int, size: int):
    heads, width = 32, 128
    shape = RecurrentShape(2 * heads * width, heads, width, width)
    generator = torch.Generator("cuda").manual_seed(tokens)
    x, taps, v, decay, beta = (
        torch.randn(*sizes, generator=generator, device="cuda")
        for sizes in ((size, shape.channels), (4, shape.channels), (size, heads, width), (size, heads), (size, heads))
    )
    q, k = normalize(torch.randn(2, size, heads // 2, width, generator=generator, device="cuda"), dim=-1).bfloat16()
    x, v, decay, beta = x.bfloat16(), v.bfloat16(), (-decay.exp() / 8).exp(), beta.sigmoid()
    cache = Cache([shape], CacheSettings("none"), context=4096, sequences=3, dtype=torch.bfloat16, device="cuda")
    layer, found = cache.layers[0], []
    cache.open()
    for rows, padding in ((size, size - tokens), (tokens, None)):
        sequence = cache.open()
        batch = cache.batch([sequence])
        # from an empty state, then from a filled one
        for _ in range(2):
            batch.extend([rows], padding)
            mixed = layer.convolve(batch, x[:rows], taps)
            read = layer.update(batch, *(each[:rows] for each in (q, k, v, decay, beta)))
            batch.drop_padding()
        slot = sequence.group_states[cache.states].slot
        assert sequence.length == 2 * tokens
        found.append([mixed[:tokens], layer.conv[slot], read[:tokens].float(), layer.delta[slot]])
    (mixed, conv, read, delta), plain = found
    assert torch.equal(mixed, plain[0])
    assert torch.equal(conv, plain[1])
    assert error(read, plain[2]) < 1e-2
    assert error(delta, plain[3]) < 1e-2
    # the same kernel ran both
    if tokens >= 64 or size < 64:
        assert torch.equal(delta, plain[3])
