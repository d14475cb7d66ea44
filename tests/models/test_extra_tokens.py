"""Steps of prompts are filled up to sizes that recur: what is read and remembered is what it would be without the rest."""

import gc
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from auraflux.cache import Batch, Cache, CacheSettings, RecurrentShape
from auraflux.run.engine import Engine
from auraflux.run.graph import Replayer
from tests.models.oracles import error, prefill, save, tokens
from tests.models.test_gpu import engine_for, use_every_expert
from tests.models.test_qwen3_5_moe import qwen3_5_moe
from tests.models.test_replay import ALL, MODELS, engines, named_caches

PIECES = 45, 3, 70, 1, 33  # tokens
SIZES = [64, 32, 128, None, 64]  # of the steps they are read in, one token as it is


def said(engine: Engine, text: list[int]) -> Tensor:
    """What is said after prompts that follow each other, and after a few tokens one by one."""
    sequence, scores, at = engine.cache.open(), [], 0
    for count in PIECES:
        scores.append(prefill(engine, sequence, text[at : at + count]))
        at += count
        assert sequence.length == at
    batch = engine.cache.batch([sequence])
    return torch.stack([*scores, *(engine.decode(batch, [token])[0] for token in text[at:])])


@pytest.mark.parametrize(("name", "kv"), named_caches())
def test_extra_tokens_come_to_nothing(name: str, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    source = ALL[name]()
    engine, text = engines(save(source, tmp_path), kv)[False], tokens(source, sum(PIECES) + 3)
    engine.runner.exact = True
    plain = said(engine, text)
    sizes = []
    size_of = Engine._size_of

    def noted(self, batch, counts):
        sizes.append(size_of(self, batch, counts))
        return sizes[-1]

    monkeypatch.setattr(Engine, "_size_of", noted)
    monkeypatch.setattr(Replayer, "reads", True)
    assert error(said(engine, text), plain) < (1e-5 if kv == "none" else 1e-3)
    assert sizes == SIZES


WIDE = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}  # heads that kernels of their own serve
ON_GPU = {**MODELS, "wide_heads": lambda: qwen3_5_moe(**WIDE)}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "kv"), [("qwen3_moe", "k8v4"), *product(["qwen3_5_moe", "wide_heads", "gpt_oss"], ["none", "k8v4"])]
)
def test_a_replay_of_prompts_is_what_was_recorded(name: str, kv: str, tmp_path: Path):
    torch.manual_seed(0)
    source = ON_GPU[name]()
    folder, text = save(source, tmp_path), tokens(source, 300)
    # replayed with other tokens, with fewer and with as many as the step has
    prompts = [text[:200]] * 3 + [text[100:300], text[:150], text[:256], text[44:300]]
    prompts += [text[:30]] * 2 + [text[:20], text[9:41], text[:3], text[:2]]
    found = {}
    for graphs in (True, False):
        engine = engine_for(folder, kv, "cuda", torch.bfloat16, bits=4, context=640, chunk=256, graphs=graphs)
        scores = []
        for number, prompt in enumerate(prompts):
            # recurrent states are in one place, then in another
            other = engine.cache.open() if number % 2 else None
            sequence = engine.cache.open()
            scores.append(prefill(engine, sequence, prompt))
            scores.append(engine.decode(engine.cache.batch([sequence]), [7])[0])
            # a second piece of the same size is a replay too
            scores.append(prefill(engine, sequence, prompt[::-1]))
            scores.append(engine.decode(engine.cache.batch([sequence]), [8])[0])
            sequence.close()
            if other is not None:
                other.close()
        found[graphs] = torch.stack(scores)
        steps = engine.replayer._steps.values()
        recorded = {len(step.ids) for step in steps if step.recording and len(step.ids) > 1}
        assert recorded == ({32, 256} if graphs else set()), engine.replayer.unread
    assert torch.equal(found[True], found[False])


@pytest.mark.gpu
def test_an_engine_that_is_gone_does_not_spoil_the_recordings_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    source = MODELS["qwen3_moe"]()
    folder, text = save(source, tmp_path), tokens(source, 64)
    engines = [engine_for(folder, "none", "cuda", torch.bfloat16, bits=4, sequences=3) for _ in range(2)]
    for engine in engines[:1] * 3 + engines[1:]:
        prefill(engine, engine.cache.open(), text)
    assert any(step.recording for step in engines.pop(0).replayer._steps.values())
    forward = engine.runner.forward

    def collecting(flat: Tensor, batch: Batch) -> Tensor:
        if gc.isenabled():
            gc.collect()
        return forward(flat, batch)

    monkeypatch.setattr(engine.runner, "forward", collecting)
    prefill(engine, engine.cache.open(), text)
    assert engine.replayer.unread is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3_5_moe", "wide_heads"])
def test_on_a_gpu_extra_tokens_come_to_nothing(name: str, tmp_path: Path):
    torch.manual_seed(0)
    source = ON_GPU[name]()
    use_every_expert(source.config.get_text_config())
    folder, text = save(source, tmp_path), tokens(source, sum(PIECES) + 3)
    engine = engine_for(folder, "none", "cuda", torch.bfloat16)
    filled = said(engine, text)
    engine.replayer.unread = "pieces are read as they are"
    assert error(filled, said(engine, text)) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "size"), [(2, 32), (3, 32), (17, 32), (40, 64), (65, 128), (700, 768), (1000, 1024)])
def test_a_state_takes_in_no_extra_token(tokens: int, size: int):
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
    for rows, extra in ((size, size - tokens), (tokens, None)):
        sequence = cache.open()
        batch = cache.batch([sequence])
        # from an empty state, then from one that is not
        for _ in range(2):
            batch.extend([rows], extra)
            mixed = layer.convolve(batch, x[:rows], taps)
            read = layer.update(batch, *(each[:rows] for each in (q, k, v, decay, beta)))
            batch.drop_extra()
        slot = sequence.rows[cache.states].slot
        assert sequence.length == 2 * tokens
        found.append([mixed[:tokens], layer.conv[slot], read[:tokens].float(), layer.delta[slot]])
    (mixed, conv, read, delta), plain = found
    assert torch.equal(mixed, plain[0])
    assert torch.equal(conv, plain[1])
    assert error(read, plain[2]) < 1e-2
    assert error(delta, plain[3]) < 1e-2
    # one kernel served both
    if tokens >= 64 or size < 64:
        assert torch.equal(delta, plain[3])
