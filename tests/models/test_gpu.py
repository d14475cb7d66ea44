"""Whole tiny models on the GPU: as on the CPU, and the same to the bit with and without graphs."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from auraflux.cache import CacheSettings
from auraflux.models import family
from auraflux.ops import use_backend
from auraflux.ops.turboquant.codebook import BITS
from auraflux.run.engine import Engine
from auraflux.run.graph import Replayer
from auraflux.run.request import Request
from auraflux.run.sampling import Sampling
from auraflux.run.scheduler import Scheduler
from auraflux.weights.checkpoint import open_checkpoint
from auraflux.weights.loader import Weights
from tests.models.oracles import error, prefill, save, tokens, truth
from tests.models.test_replay import ALL, MODELS, PROMPT, STEPS

pytestmark = pytest.mark.gpu
ALONE = 10  # of the text, one by one
PAIRS = [f"k{key}v{value}" for key, value in product(BITS, BITS)]


def engine_for(folder: Path, kv: str, device: str, dtype: torch.dtype, bits: int | None = None, **options: Any) -> Engine:
    checkpoint = open_checkpoint(folder)
    module = family(checkpoint.config)
    config = module.Config.from_hf(checkpoint.config)
    weights = Weights(checkpoint, module.rename, bits=bits, group=32, device=device, dtype=dtype)
    model, shapes = module.Model(config, weights), module.make_caches(config)
    weights.done()
    common = {"context": 256, "sequences": 2, "chunk": 64, "exact": True}
    return Engine(model, shapes, CacheSettings(kv), dtype=dtype, device=device, **{**common, **options})


def scores(engine: Engine, text: list[int]) -> Tensor:
    """What is said after every token, the last few of them taken one by one."""
    sequence = engine.cache.open()
    together = engine.all_scores(sequence, text[:-ALONE])
    batch = engine.cache.batch([sequence])
    return torch.cat([together, *(engine.decode(batch, [token]) for token in text[-ALONE:])]).float().cpu()


def use_every_expert(config: Any) -> None:
    """Have tokens go to all experts: where two score alike, rounding may choose another one, and such a token is far off."""
    for count in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(config, count, None):
            config.num_experts_per_tok = getattr(config, count)
    if getattr(config, "top_k_experts", None):
        config.top_k_experts = config.num_experts
    if getattr(config, "n_group", None):
        config.topk_group = config.n_group


@pytest.mark.parametrize("name", ALL)
def test_a_model_says_on_the_gpu_what_it_says_on_the_cpu(name: str, tmp_path: Path):
    torch.manual_seed(0)
    source = ALL[name]()
    use_every_expert(source.config.get_text_config())
    folder, text = save(source, tmp_path), tokens(source, 110)
    with use_backend("reference"):
        wanted = scores(engine_for(folder, "none", "cpu", torch.float32), text)
    # read anew, since some of its parts know how many experts a token had when they were made
    assert error(wanted, truth(type(source).from_pretrained(folder), text)) < 2e-4
    assert error(scores(engine_for(folder, "none", "cuda", torch.float32), text), wanted) < 1e-3
    assert error(scores(engine_for(folder, "none", "cuda", torch.bfloat16), text), wanted) < 0.02


@pytest.mark.parametrize(
    ("name", "kv"), [*product(MODELS, ["none", "k8v4", "k4v4"]), *(("qwen3_moe", kv) for kv in PAIRS), ("gpt_oss", "k3v3")]
)
def test_a_graph_is_the_step_it_was_captured_from(name: str, kv: str, tmp_path: Path):
    torch.manual_seed(0)
    source = MODELS[name]()
    folder, text = save(source, tmp_path), tokens(source, PROMPT + STEPS)
    found = {}
    for graphs in (True, False):
        engine = engine_for(folder, kv, "cuda", torch.bfloat16, bits=4, graphs=graphs)
        pair = [engine.cache.open(), engine.cache.open()]
        for sequence, length in zip(pair, (PROMPT, 7), strict=True):
            prefill(engine, sequence, text[:length])
        batch = engine.cache.batch(pair)
        found[graphs] = torch.stack([engine.decode(batch, [token, token // 2]) for token in text[PROMPT:]])
    assert torch.equal(found[True], found[False])


def written(engine: Engine, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
    """What texts become that are written together and end after 9, 17, 25, ... tokens."""
    scheduler = Scheduler(engine, None, frozenset(), parallel=len(prompts))
    limits = range(9, 9 + 8 * len(prompts), 8)
    jobs = [
        scheduler.submit(Request(tuple(prompt), replace(sampling, max_tokens=limit)))
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    scheduler.wait(lambda: all(job.finish for job in jobs))
    scheduler.prefixes.clear()
    return [job.stream.tokens for job in jobs]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.9, frequency_penalty=0.5, seed=3)])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe", "gpt_oss"])
def test_steps_that_begin_before_their_tokens_are_known_change_nothing(
    name: str, sampling: Sampling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    source = MODELS[name]()
    folder, text = save(source, tmp_path), tokens(source, PROMPT)
    prompts = [text, text[:7], text[3:]]
    ahead, turns = (
        engine_for(folder, "k8v4", "cuda", torch.bfloat16, bits=4, sequences=3, graphs=graphs) for graphs in (True, False)
    )
    assert ahead.replayer.ahead
    # the second time all steps are recorded
    found = [written(ahead, prompts, sampling) for _ in range(2)]
    assert ahead.replayer.refused is None
    monkeypatch.setattr(Replayer, "ahead", False)
    assert found == [written(turns, prompts, sampling)] * 2


PIECE, PIECES, REST = 128, 5, 7
# llama's heads are 16 wide here: no kernel codes them, and the reference cannot be recorded
LONG = [pair for pair in product(MODELS, ["none", "k8v4"]) if pair != ("llama", "k8v4")]


@pytest.mark.parametrize(("name", "kv"), LONG)
def test_a_long_prompt_is_read_by_replays_of_a_piece(name: str, kv: str, tmp_path: Path):
    torch.manual_seed(0)
    source = MODELS[name]()
    folder, text = save(source, tmp_path), tokens(source, PIECES * PIECE + REST)
    found = {}
    for graphs in (True, False):
        options = {"context": 1024, "chunk": PIECE, "graphs": graphs}
        engine = engine_for(folder, kv, "cuda", torch.bfloat16, bits=4, **options)
        scores = []
        # the second prompt has no piece that is not a replay
        for prompt in (text, text[::-1]):
            sequence = engine.cache.open()
            scores.append(prefill(engine, sequence, prompt))
            batch = engine.cache.batch([sequence])
            scores += [engine.decode(batch, [token])[0] for token in text[:3]]
            sequence.close()
        found[graphs] = torch.stack(scores)
        recorded = [step for step in engine.replayer._steps.values() if step.recording and len(step.ids) == PIECE]
        assert bool(recorded) == graphs, engine.replayer.unread
    assert torch.equal(found[True], found[False])
