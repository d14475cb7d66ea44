"""Steps of prompts are filled up to sizes that recur: what is read and remembered is what it would be without the rest."""

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from auraflux.run.engine import Engine
from auraflux.run.graph import Decoder
from tests.models.oracles import error, save, tokens
from tests.models.test_gpu import engine_for
from tests.models.test_replay import MODELS, engines

PIECES = 45, 3, 70, 1, 33  # tokens
SIZES = [64, 32, 128, None, 64]  # of the steps they are read in, one token as it is
RECURRENT = ("qwen3_5_moe",)  # whose states cannot go back


def said(engine: Engine, text: list[int]) -> Tensor:
    """What is said after prompts that follow each other, and after a few tokens one by one."""
    sequence, scores, at = engine.cache.open(), [], 0
    for count in PIECES:
        scores.append(engine.prefill(sequence, text[at : at + count]))
        at += count
        assert sequence.length == at
    batch = engine.cache.batch([sequence])
    return torch.stack([*scores, *(engine.decode(batch, [token])[0] for token in text[at:])])


@pytest.mark.parametrize("kv", ["none", "k8v4"])
@pytest.mark.parametrize("name", MODELS)
def test_extra_tokens_come_to_nothing(name: str, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    source = MODELS[name]()
    engine, text = engines(save(source, tmp_path), kv)[False], tokens(source, sum(PIECES) + 3)
    engine.exact = True
    plain = said(engine, text)
    sizes = []
    size_of = Engine._size_of

    def noted(self, batch, counts):
        sizes.append(size_of(self, batch, counts))
        return sizes[-1]

    monkeypatch.setattr(Engine, "_size_of", noted)
    monkeypatch.setattr(Decoder, "reads", True)
    assert error(said(engine, text), plain) < (1e-5 if kv == "none" else 1e-3)
    assert sizes == ([None] * len(SIZES) if name in RECURRENT else SIZES)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "kv"), [("qwen3_moe", "k8v4"), *product(["qwen3_5_moe", "gpt_oss"], ["none", "k8v4"])])
def test_a_replay_of_prompts_is_what_was_recorded(name: str, kv: str, tmp_path: Path):
    torch.manual_seed(0)
    source = MODELS[name]()
    folder, text = save(source, tmp_path), tokens(source, 300)
    prompts = [text[:256]] * 3 + [text[44:300]] + [text[:32]] * 2 + [text[9:41]]
    if name not in RECURRENT:
        # filled up, and replayed with other tokens and with fewer
        prompts += [text[:200]] * 3 + [text[100:300], text[:150]] + [text[:30]] * 2 + [text[:20]]
    found = {}
    for graphs in (True, False):
        engine = engine_for(folder, kv, "cuda", torch.bfloat16, bits=4, context=512, chunk=256, graphs=graphs)
        scores = []
        for prompt in prompts:
            sequence = engine.cache.open()
            scores.append(engine.prefill(sequence, prompt))
            scores.append(engine.decode(engine.cache.batch([sequence]), [7])[0])
            sequence.close()
        found[graphs] = torch.stack(scores)
        steps = engine.decoder._steps.values()
        recorded = {len(step.ids) for step in steps if step.recording and len(step.ids) > 1}
        assert recorded == ({32, 256} if graphs else set()), engine.decoder.unread
    assert torch.equal(found[True], found[False])
