"""RoPE against transformers and float64, its symmetries, and every frequency scaling against transformers'."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from auraflux.errors import InputError
from auraflux.ops._dispatch import use_backend
from auraflux.ops.rope.frequencies import (
    divided_frequencies,
    dynamic_frequencies,
    linear_frequencies,
    llama3_frequencies,
    longrope_mscale,
    rope_frequencies,
    yarn_frequencies,
)
from auraflux.ops.rope.reference import rope

BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])


def cos_sin(inv_freq: torch.Tensor, positions: torch.Tensor, mscale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tables in the layout of transformers."""
    angles = positions.float()[:, None] * inv_freq
    doubled = torch.cat((angles, angles), -1)
    return doubled.cos()[None] * mscale, doubled.sin()[None] * mscale


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_half_split_pairs_are_those_of_llama(backend, dtype):
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, head_dim=128)
    x, positions = torch.randn(7, 2, 128), torch.tensor([0, 1, 5, 100, 999, 4095, 2047])
    cosine, sine = LlamaRotaryEmbedding(config)(x, positions[None])
    heads_first = x.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(heads_first, heads_first, cosine, sine)
    with use_backend(backend):
        found = rope(x, rope_frequencies(128, 10_000.0), positions.to(dtype))
    torch.testing.assert_close(found, expected[0].transpose(0, 1), atol=2e-5, rtol=1e-5)


@BACKENDS
def test_interleaved_pairs_are_those_of_deepseek(backend):
    inv_freq, mscale = yarn_frequencies(64, 10_000.0, 40.0, 4096, mscale=1.0, mscale_all_dim=0.5)
    x, positions = torch.randn(5, 3, 64), torch.arange(40, 45)
    heads_first = x.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb_interleave(heads_first, heads_first, *cos_sin(inv_freq, positions, mscale))
    with use_backend(backend):
        found = rope(x, inv_freq, positions, mscale, interleaved=True)
    # transformers moves the even channels before the odd ones; here channels are not permuted
    deinterleaved = torch.cat((found[..., 0::2], found[..., 1::2]), -1)
    torch.testing.assert_close(deinterleaved, expected[0].transpose(0, 1), atol=2e-5, rtol=1e-5)


@BACKENDS
@pytest.mark.parametrize("start", [0, 100_000, 1_000_000, 10_000_000])
def test_far_positions_keep_their_accuracy(backend, start):
    inv_freq, positions = rope_frequencies(128, 1e7), torch.arange(start, start + 40)
    x = torch.zeros(40, 1, 128)
    x[..., :64] = 1
    with use_backend(backend):
        found = rope(x, inv_freq, positions)[:, 0]
    for position, row in zip(positions.tolist(), found.tolist(), strict=True):
        for i, frequency in enumerate(inv_freq.tolist()):
            angle = (torch.tensor(float(position)) * torch.tensor(frequency)).item()
            assert abs(row[i] - math.cos(angle)) < 2.5e-7
            assert abs(row[i + 64] - math.sin(angle)) < 2.5e-7


@BACKENDS
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_preserves_norms_and_scores_depend_on_distance(backend, interleaved):
    inv_freq, x = rope_frequencies(32, 10_000.0), torch.randn(2, 1, 48)
    with use_backend(backend):
        scores = []
        for start in (0, 50, 3000):
            turned = rope(x, inv_freq, torch.tensor([start, start + 7]), interleaved=interleaved)
            torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
            assert torch.equal(turned[..., 32:], x[..., 32:])
            scores.append((turned[0] @ turned[1].T).item())
    assert scores == pytest.approx([scores[0]] * 3, abs=5e-3)


@BACKENDS
def test_position_zero_changes_nothing_and_mscale_scales(backend):
    x, positions = torch.randn(1, 2, 16), torch.tensor([0])
    with use_backend(backend):
        assert torch.equal(rope(x, rope_frequencies(16, 1e4), positions), x)
        torch.testing.assert_close(rope(x, rope_frequencies(16, 1e4), positions, 1.5), 1.5 * x)


@BACKENDS
def test_the_argument_is_left_alone(backend):
    x = torch.randn(3, 2, 16)
    before = x.clone()
    with use_backend(backend):
        rope(x, rope_frequencies(16, 1e4), torch.arange(3))
    assert torch.equal(x, before)


def test_arguments_that_do_not_fit_are_refused():
    x, inv_freq, positions = torch.randn(3, 2, 16), rope_frequencies(16, 1e4), torch.arange(3)
    with pytest.raises(InputError, match="9 frequencies rotate 18 channels; x has 16"):
        rope(x, rope_frequencies(18, 1e4), positions)
    with pytest.raises(InputError, match=r"'positions' has shape \[2\]; \[3\] is needed"):
        rope(x, inv_freq, positions[:2])
    with pytest.raises(InputError, match="'positions' has dtype float32; int32 or int64 is needed"):
        rope(x, inv_freq, positions.float())
    with pytest.raises(InputError, match="'inv_freq' has dtype float64; float32 is needed"):
        rope(x, inv_freq.double(), positions)
    with pytest.raises(InputError, match=r"'x' .* is not contiguous"):
        rope(x.transpose(0, 1), inv_freq, positions[:2])
    with pytest.raises(InputError, match=r"'x' has shape \[3, 32\]"):
        rope(x.flatten(1), inv_freq, positions)
    with pytest.raises(InputError, match="15 channels cannot be rotated in pairs"):
        rope_frequencies(15, 1e4)


def transformers_frequencies(kind: str, width: int, **settings: object) -> tuple[torch.Tensor, float]:
    parameters = {"rope_type": kind, **settings}
    config = LlamaConfig(hidden_size=4 * width, num_attention_heads=4, head_dim=width, rope_parameters=parameters)
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


@pytest.mark.parametrize(("width", "theta"), [(64, 1e4), (128, 1e6), (256, 1e7), (50, 150_000.0)])
def test_default_frequencies(width, theta):
    config = LlamaConfig(head_dim=width, rope_parameters={"rope_type": "default", "rope_theta": theta})
    expected, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    assert torch.equal(rope_frequencies(width, theta), expected)


@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_linear_frequencies(factor):
    expected, _ = transformers_frequencies("linear", 128, rope_theta=1e4, factor=factor)
    assert torch.equal(linear_frequencies(128, 1e4, factor), expected)


@pytest.mark.parametrize(
    ("factor", "low", "high", "context"), [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (4.0, 2.0, 8.0, 1024)]
)
def test_llama3_frequencies(factor, low, high, context):
    settings = {
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }
    expected, _ = transformers_frequencies("llama3", 128, rope_theta=5e5, **settings)
    torch.testing.assert_close(llama3_frequencies(128, 5e5, factor, low, high, context), expected, rtol=1e-6, atol=0)


def extended(kind: str, **parameters: object) -> LlamaConfig:
    heads = {"hidden_size": 96, "num_attention_heads": 2, "head_dim": 48, "max_position_embeddings": 512}
    return LlamaConfig(**heads, rope_parameters={"rope_type": kind, "rope_theta": 1e4, **parameters})


@pytest.mark.parametrize("context", [100, 512, 513, 4000])
def test_dynamic_frequencies(context):
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](extended("dynamic", factor=3.0), torch.device("cpu"), seq_len=context)
    torch.testing.assert_close(dynamic_frequencies(48, 1e4, 3.0, 512, context), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("factor", [None, 2.0])
def test_longrope_frequencies(factor):
    factors = {"short": [1 + i / 24 for i in range(24)], "long": [1 + i for i in range(24)]}
    given = {f"{kind}_factor": each for kind, each in factors.items()} | {"original_max_position_embeddings": 128}
    config = extended("longrope", **given, **({} if factor is None else {"factor": factor}))
    for kind, context in (("short", 128), ("long", 129)):
        expected, mscale = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=context)
        torch.testing.assert_close(divided_frequencies(48, 1e4, factors[kind]), expected, rtol=1e-6, atol=0)
        assert longrope_mscale(factor or 4.0, 128) == pytest.approx(mscale)
    with pytest.raises(InputError, match="23 factors divide 24 frequencies"):
        divided_frequencies(48, 1e4, factors["long"][1:])


GPT_OSS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
DEEPSEEK = {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("width", "theta", "factor", "context", "settings"),
    [
        (64, 150_000.0, 32.0, 4096, GPT_OSS),
        (64, 10_000.0, 40.0, 4096, DEEPSEEK),
        (64, 10_000.0, 40.0, 4096, {**DEEPSEEK, "mscale": 0.707, "mscale_all_dim": 1.0}),
        (128, 1e6, 4.0, 32768, {}),
        (128, 1e6, 4.0, 32768, {"attention_factor": 1.25}),
        (128, 1e6, 1.0, 32768, {}),
        (32, 1e4, 8.0, 128, {"beta_fast": 64, "beta_slow": 2}),
        (8, 1e4, 8.0, 16, {}),
        (64, 1e4, 4.0, 2048, {"mscale": 0.5}),
    ],
)
def test_yarn_frequencies(width, theta, factor, context, settings):
    named = {"rope_theta": theta, "factor": factor, "original_max_position_embeddings": context, **settings}
    expected, expected_mscale = transformers_frequencies("yarn", width, **named)
    found, mscale = yarn_frequencies(width, theta, factor, context, **settings)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert mscale == pytest.approx(expected_mscale, rel=1e-12)


def test_yarn_needs_a_base_above_1():
    with pytest.raises(InputError, match="YaRN needs a RoPE base above 1; it is 1"):
        yarn_frequencies(64, 1.0, 40.0, 4096)
