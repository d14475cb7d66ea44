"""With `invariant` a text's scores on a GPU are the same bits however it is read: in pieces, beside others, replayed."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from auraflux.bench.random_weights import random_model
from auraflux.cache import CacheSettings, Sequence
from auraflux.run.engine import Engine
from auraflux.run.request import Request
from auraflux.run.sampling import Sampling
from auraflux.run.scheduler import Scheduler
from tests.run.test_speculate import Told, eager

pytestmark = pytest.mark.gpu

COMMON = {"vocab_size": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 4096}
LLAMA = {"model_type": "llama", "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2}
MOE = {"num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True, "num_attention_heads": 8, "num_key_value_heads": 2}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 512,
    "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_hidden_layers": 3, "first_k_dense_replace": 1,
    "q_lora_rank": 512, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "hidden_size": 512, "head_dim": 64, "num_hidden_layers": 2},
    "llama-mid": {**LLAMA, "hidden_size": 2304, "intermediate_size": 3584, "head_dim": 128, "num_hidden_layers": 3},
    "qwen3_moe": {
        **MOE, "model_type": "qwen3_moe", "hidden_size": 1024, "intermediate_size": 1024, "moe_intermediate_size": 512,
        "head_dim": 128, "num_hidden_layers": 3,
    },
    "qwen3_5_moe": {
        **MOE, **DELTA, "model_type": "qwen3_5_moe_text", "hidden_size": 1024, "moe_intermediate_size": 256, "head_dim": 256,
        "shared_expert_intermediate_size": 256, "num_hidden_layers": 4, "full_attention_interval": 2,
        "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25, "num_attention_heads": 4,
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "hidden_size": 768, "intermediate_size": 768, "num_hidden_layers": 3, "head_dim": 64,
        "num_attention_heads": 8, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 4,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "deepseek_v3": {**DEEPSEEK, "num_attention_heads": 16, "num_key_value_heads": 16},
    "deepseek_v3-rows": {**DEEPSEEK, "num_attention_heads": 64, "num_key_value_heads": 64, "num_hidden_layers": 2},
}  # fmt: skip
FORMATS = {"llama": (4, 32), "gpt_oss": (8, 64)}  # bits and groups; those of others are the commonest
KVS = ("none", "k8v4", "k4v4")
LENGTH, PIECES = 300, (1, 7, 37, 64, 100)


@cache
def model_of(name: str) -> tuple[Any, list[Any]]:
    bits, group = FORMATS.get(name, (4, 64))
    return random_model({**COMMON, **SHAPES[name]}, bits, group, torch.bfloat16, torch.device("cuda"))


def engine_of(name: str, kv: str, **options: Any) -> Engine:
    model, shapes = model_of(name)
    sizes: dict[str, Any] = {"context": 1024, "sequences": 12, "chunk": 512, "invariant": True, **options}
    return Engine(model, shapes, CacheSettings(kv), **sizes, dtype=torch.bfloat16, device="cuda")


def text_of(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(0, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def read(engine: Engine, sequence: Sequence, text: list[int], size: int, others: int = 0) -> Tensor:
    """All scores of a text that is read in pieces, beside pieces of one to three tokens of others."""
    beside = [engine.cache.open() for _ in range(others)]
    for n, each in enumerate(beside):
        engine.step(engine.cache.batch([each]), [text_of(50 + n, 20 * n + 5)])
    batch, found = engine.cache.batch([sequence, *beside]), []
    for n, at in enumerate(range(0, len(text), size)):
        piece = text[at : at + size]
        ids = [piece, *(text_of(99 + n, 1 + (n + i) % 3) for i in range(others))]
        found.append(engine.score(engine.step(batch, ids)[: len(piece)]).cpu())
    for each in beside:
        each.close()
    return torch.cat(found)


def alone(engine: Engine, text: list[int], size: int, others: int = 0) -> Tensor:
    sequence = engine.cache.open()
    found = read(engine, sequence, text, size, others)
    sequence.close()
    return found


def same(found: Tensor, expected: Tensor) -> bool:
    return bool(torch.equal(found.view(torch.int32), expected.view(torch.int32)))


def written(engine: Engine, sequences: list[Sequence], texts: list[list[int]]) -> Tensor:
    """Scores of the first text after every token, which all texts get one at a time, by replays."""
    batch = engine.writing(sequences)
    return torch.cat([engine.decode(batch, list(ids))[:1].cpu() for ids in zip(*texts, strict=True)])


@pytest.mark.parametrize("kv", KVS)
@pytest.mark.parametrize("name", SHAPES)
def test_pieces_and_company_change_nothing(name: str, kv: str):
    engine, text = engine_of(name, kv), text_of(1)
    expected = alone(engine, text, LENGTH)
    assert torch.isfinite(expected).all()
    parted = [f"pieces of {size}" for size in PIECES if not same(alone(engine, text, size), expected)]
    parted += [f"beside {count} others" for count in (1, 3, 8) if not same(alone(engine, text, 37, count), expected)]
    first = engine.cache.open()
    read(engine, first, text[:77], 77)
    fork = first.fork()
    read(engine, first, text[10:20], 3)
    place = 45 - first.truncate(45)
    if not same(read(engine, first, text[place:], 13), expected[place:]):
        parted.append("after a cut")
    if not same(read(engine, fork, text[77:], 50), expected[77:]):
        parted.append("after a fork")
    for each in (first, fork):
        each.close()
    for count in (1, 3, 8):
        sequences = [engine.cache.open() for _ in range(count)]
        for n, sequence in enumerate(sequences):
            read(engine, sequence, text[:200] if n == 0 else text_of(7 + n, 30 * n), 64)
        if not same(written(engine, sequences, [text[200:], *(text_of(n, 100) for n in range(1, count))]), expected[200:]):
            parted.append(f"written with {count - 1} others")
        for sequence in sequences:
            sequence.close()
    assert not parted


@pytest.mark.parametrize("kv", ["none", "k8v4"])
@pytest.mark.parametrize("name", ["llama-mid", "qwen3_moe"])
def test_prompts_that_were_found_change_nothing(name: str, kv: str):
    """Texts are the same whether their beginnings are read anew, found, or read in other pieces beside others."""
    found = []
    for chunk, together in ((512, 1), (64, 1), (100, 4)):
        scheduler = Scheduler(engine_of(name, kv, chunk=chunk), None, frozenset(), parallel=4)
        prompts = [text_of(1)[:end] for end in (131, 200, 250, 299)]
        for _ in range(2):
            made = {}
            for at in range(0, len(prompts), together):
                some = prompts[at : at + together]
                jobs = [scheduler.submit(Request(tuple(prompt), Sampling(max_tokens=20, endless=True))) for prompt in some]
                scheduler.wait(lambda jobs=jobs: all(job.finish for job in jobs))
                made |= {len(prompt): job.stream.tokens for prompt, job in zip(some, jobs, strict=True)}
            found.append(made)
        scheduler.prefixes.clear()
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("kv", KVS)
@pytest.mark.parametrize("name", SHAPES)
def test_guesses_change_nothing(name: str, kv: str):
    """Texts alone and together, some with a settled number of guesses and some with fewer, by replays and by Python."""
    engine = engine_of(name, kv)
    scheduler = Scheduler(engine, None, frozenset(), parallel=4)
    prompts, sampling = (
        [text_of(n, length) for n, length in enumerate((131, 20, 300, 64))],
        Sampling(max_tokens=60, endless=True),
    )

    def text_by_text(together: int) -> list[list[int]]:
        texts = []
        for at in range(0, len(prompts), together):
            jobs = [scheduler.submit(Request(tuple(prompt), sampling)) for prompt in prompts[at : at + together]]
            scheduler.wait(lambda jobs=jobs: all(job.finish for job in jobs))
            texts += [job.stream.tokens for job in jobs]
        return texts

    plain = text_by_text(1)
    whole = [[*prompt, *text] for prompt, text in zip(prompts, plain, strict=True)]
    guessing = eager(lambda: Told(whole))
    scheduler.speculate(guessing)
    assert text_by_text(1) == plain
    assert text_by_text(4) == plain
    assert guessing.accepted > 100
    recorded = [step for step in engine.replayer._several.values() if step.recording is not None]
    assert recorded, engine.replayer.unread
    # states cannot be cut, so that texts with fewer guesses are not filled up
    assert engine.cache.moves or any(len(step.batch.counts) == 4 for step in recorded)


@pytest.mark.parametrize("kv", KVS)
@pytest.mark.parametrize("name", SHAPES)
def test_a_prompt_that_is_read_with_what_is_written_changes_nothing(name: str, kv: str):
    """Neither the text that is written, nor what follows the prompt; the steps are run, recorded, and replayed."""
    engine, text, prompt = engine_of(name, kv), text_of(1), text_of(2)
    expected, follows = alone(engine, text, LENGTH), alone(engine, prompt, LENGTH)
    reading, *sequences = [engine.cache.open() for _ in range(4)]
    for n, sequence in enumerate(sequences):
        read(engine, sequence, text[:200] if n == 0 else text_of(7 + n, 30 * n), 64)
    batch, found = engine.writing(sequences), []
    for step, token in enumerate(text[200:240]):
        ids, piece = [token, step, step + 1], prompt[reading.length :][: (5, 64, 20)[step % 3]]
        scores = engine.decode_beside(batch, ids, reading, piece) if reading.length < 250 else engine.decode(batch, ids)
        assert scores is not None
        found.append(scores[:1].cpu())
    assert same(torch.cat(found), expected[200:240])
    at = reading.length
    assert at >= 250
    assert same(read(engine, reading, prompt[at:], 20), follows[at:])
