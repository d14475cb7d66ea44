"""With `invariant`, a sequence's logits on a GPU are bit-identical for any chunking, batch and use of graphs."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from auraflux.bench.random_weights import random_model
from auraflux.cache import CacheSettings, KVSequence
from auraflux.engine.engine import Engine
from auraflux.engine.request import Request
from auraflux.engine.sampling import Sampling
from auraflux.scheduler.scheduler import Scheduler
from tests.speculative.test_speculation import OracleProposer, eager

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
FORMATS = {"llama": (4, 32), "gpt_oss": (8, 64)}  # bits and group size, where not (4, 64)
KVS = ("none", "k8v4", "k4v4")
LENGTH, CHUNKS = 300, (1, 7, 37, 64, 100)


@cache
def model_of(name: str) -> tuple[Any, list[Any]]:
    bits, group = FORMATS.get(name, (4, 64))
    return random_model({**COMMON, **SHAPES[name]}, bits, group, torch.bfloat16, torch.device("cuda"))


def engine_of(name: str, kv: str, **options: Any) -> Engine:
    model, shapes = model_of(name)
    sizes: dict[str, Any] = {"context": 1024, "sequences": 12, "chunk": 512, "invariant": True, **options}
    return Engine(model, shapes, CacheSettings(kv), **sizes, dtype=torch.bfloat16, device="cuda")


def random_tokens(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(0, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def prefill_logits(engine: Engine, sequence: KVSequence, prompt: list[int], size: int, others: int = 0) -> Tensor:
    """Return all logits of a chunked prefill in one batch with chunks of one to three tokens of other sequences."""
    neighbours = [engine.cache.open() for _ in range(others)]
    for n, each in enumerate(neighbours):
        engine.step(engine.cache.batch([each]), [random_tokens(50 + n, 20 * n + 5)])
    batch, found = engine.cache.batch([sequence, *neighbours]), []
    for n, at in enumerate(range(0, len(prompt), size)):
        chunk = prompt[at : at + size]
        ids = [chunk, *(random_tokens(99 + n, 1 + (n + i) % 3) for i in range(others))]
        found.append(engine.compute_logits(engine.step(batch, ids)[: len(chunk)]).cpu())
    for each in neighbours:
        each.close()
    return torch.cat(found)


def single_sequence_logits(engine: Engine, prompt: list[int], size: int, others: int = 0) -> Tensor:
    sequence = engine.cache.open()
    found = prefill_logits(engine, sequence, prompt, size, others)
    sequence.close()
    return found


def same(found: Tensor, expected: Tensor) -> bool:
    return bool(torch.equal(found.view(torch.int32), expected.view(torch.int32)))


def decode_logits(engine: Engine, sequences: list[KVSequence], ids: list[list[int]]) -> Tensor:
    """Return the logits of the first sequence after every decode step of a batch, which replays graphs."""
    batch = engine.decode_batch(sequences)
    return torch.cat([engine.decode(batch, list(step))[:1].cpu() for step in zip(*ids, strict=True)])


@pytest.mark.parametrize("kv", KVS)
@pytest.mark.parametrize("name", SHAPES)
def test_logits_do_not_depend_on_chunks_batch_forks_or_graphs(name: str, kv: str):
    engine, prompt = engine_of(name, kv), random_tokens(1)
    expected = single_sequence_logits(engine, prompt, LENGTH)
    assert torch.isfinite(expected).all()
    differing = [f"chunks of {size}" for size in CHUNKS if not same(single_sequence_logits(engine, prompt, size), expected)]
    differing += [
        f"batch with {count} others"
        for count in (1, 3, 8)
        if not same(single_sequence_logits(engine, prompt, 37, count), expected)
    ]
    first = engine.cache.open()
    prefill_logits(engine, first, prompt[:77], 77)
    fork = first.fork()
    prefill_logits(engine, first, prompt[10:20], 3)
    place = 45 - first.truncate(45)
    if not same(prefill_logits(engine, first, prompt[place:], 13), expected[place:]):
        differing.append("after truncate")
    if not same(prefill_logits(engine, fork, prompt[77:], 50), expected[77:]):
        differing.append("after a fork")
    for each in (first, fork):
        each.close()
    for count in (1, 3, 8):
        sequences = [engine.cache.open() for _ in range(count)]
        for n, sequence in enumerate(sequences):
            prefill_logits(engine, sequence, prompt[:200] if n == 0 else random_tokens(7 + n, 30 * n), 64)
        if not same(
            decode_logits(engine, sequences, [prompt[200:], *(random_tokens(n, 100) for n in range(1, count))]), expected[200:]
        ):
            differing.append(f"decode with {count - 1} others")
        for sequence in sequences:
            sequence.close()
    assert not differing


@pytest.mark.parametrize("kv", ["none", "k8v4"])
@pytest.mark.parametrize("name", ["llama-mid", "qwen3_moe"])
def test_prefix_cache_hits_do_not_change_the_output(name: str, kv: str):
    """Compare outputs with prefix cache misses, with hits, and with other chunk sizes and batches."""
    found = []
    for chunk, together in ((512, 1), (64, 1), (100, 4)):
        scheduler = Scheduler(engine_of(name, kv, chunk=chunk), None, frozenset(), max_sequences=4)
        prompts = [random_tokens(1)[:end] for end in (131, 200, 250, 299)]
        for _ in range(2):
            made = {}
            for at in range(0, len(prompts), together):
                some = prompts[at : at + together]
                requests = [
                    scheduler.submit(Request(tuple(prompt), Sampling(max_tokens=20, ignore_eos=True))) for prompt in some
                ]
                scheduler.wait(lambda requests=requests: all(request.finish_reason for request in requests))
                made |= {len(prompt): request.generated.tokens for prompt, request in zip(some, requests, strict=True)}
            found.append(made)
        scheduler.prefix_cache.clear()
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("kv", KVS)
@pytest.mark.parametrize("name", SHAPES)
def test_speculative_decoding_does_not_change_the_output(name: str, kv: str):
    """Compare single and batched sequences, with full and shorter drafts, in graphs and eager steps."""
    engine = engine_of(name, kv)
    scheduler = Scheduler(engine, None, frozenset(), max_sequences=4)
    prompts, sampling = (
        [random_tokens(n, length) for n, length in enumerate((131, 20, 300, 64))],
        Sampling(max_tokens=60, ignore_eos=True),
    )

    def generate(together: int) -> list[list[int]]:
        outputs = []
        for at in range(0, len(prompts), together):
            requests = [scheduler.submit(Request(tuple(prompt), sampling)) for prompt in prompts[at : at + together]]
            scheduler.wait(lambda requests=requests: all(request.finish_reason for request in requests))
            outputs += [request.generated.tokens for request in requests]
        return outputs

    plain = generate(1)
    sequences = [[*prompt, *output] for prompt, output in zip(prompts, plain, strict=True)]
    speculation = eager(lambda: OracleProposer(sequences))
    scheduler.set_speculation(speculation)
    assert generate(1) == plain
    assert generate(4) == plain
    assert speculation.accepted > 100
    recorded = [step for step in engine.graphs._verify_steps.values() if step.recording is not None]
    assert recorded, engine.graphs.prefill_refused
    # recurrent states cannot be truncated, so shorter drafts are not padded
    assert engine.cache.has_states or any(len(step.batch.counts) == 4 for step in recorded)


@pytest.mark.parametrize("kv", KVS)
@pytest.mark.parametrize("name", SHAPES)
def test_mixed_batches_do_not_change_the_logits(name: str, kv: str):
    """Compare the decoding sequence and the prefilled prompt over eager, captured and replayed steps."""
    engine, decoded, prompt = engine_of(name, kv), random_tokens(1), random_tokens(2)
    expected, follows = single_sequence_logits(engine, decoded, LENGTH), single_sequence_logits(engine, prompt, LENGTH)
    prefilling, *sequences = [engine.cache.open() for _ in range(4)]
    for n, sequence in enumerate(sequences):
        prefill_logits(engine, sequence, decoded[:200] if n == 0 else random_tokens(7 + n, 30 * n), 64)
    batch, found = engine.decode_batch(sequences), []
    for step, token in enumerate(decoded[200:240]):
        ids, chunk = [token, step, step + 1], prompt[prefilling.length :][: (5, 64, 20)[step % 3]]
        logits = engine.decode_mixed(batch, ids, prefilling, chunk) if prefilling.length < 250 else engine.decode(batch, ids)
        assert logits is not None
        found.append(logits[:1].cpu())
    assert same(torch.cat(found), expected[200:240])
    at = prefilling.length
    assert at >= 250
    assert same(prefill_logits(engine, prefilling, prompt[at:], 20), follows[at:])
