"""`QuantizedKVCache` of mlx-lm on MLX's CPU backend: our codec and mlx-lm's own cache are the oracles."""

import sys
from typing import Any

import pytest
import torch

if sys.platform == "win32":
    pytest.skip("mlx has no Windows wheels", allow_module_level=True)
mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models import cache as mlx_cache  # noqa: E402
from mlx_lm.models import gemma3_text, llama  # noqa: E402

from auraflux.errors import InputError, SettingsError  # noqa: E402
from auraflux.integrations import mlx as integration  # noqa: E402
from auraflux.integrations.mlx import PAGE, QuantizedKVCache, make_prompt_cache  # noqa: E402
from auraflux.ops.turboquant import reference  # noqa: E402
from tests.mlx_arrays import from_mlx, to_mlx  # noqa: E402

STEPS = 6


def model() -> Any:
    mx.random.seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 300, "head_dim": 32}
    return llama.Model(llama.ModelArgs("llama", num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, **sizes))


def tokens(count: int, batch: int = 1) -> Any:
    return mx.array(torch.randint(1, 300, (batch, count), generator=torch.Generator().manual_seed(1)).numpy())


def logits(of: Any, ids: Any, cache: Any, prompt: int) -> torch.Tensor:
    """Return the logits after a prompt, and after each further token."""
    found = [of(ids[:, :prompt], cache=cache)[:, -1]]
    found += [of(ids[:, at : at + 1], cache=cache)[:, -1] for at in range(prompt, ids.shape[1])]
    return from_mlx(mx.stack(found, axis=1).astype(mx.float32))


def divergence(found: torch.Tensor, expected: torch.Tensor) -> float:
    p, q = expected.log_softmax(-1), found.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize(("bits", "width"), [(2, 64), (4, 128), (8, 32), (4, 96)])
def test_codes_are_those_of_the_codec(bits: int, width: int):
    x = torch.randn(3, 50, width, generator=torch.Generator().manual_seed(3))
    codes, norms = reference.encode.reference(x, bits, 7)
    ours, our_norms = integration.encode(to_mlx(x), bits, 7)
    # sums in another order move a coordinate that lies on a bound
    assert (from_mlx(ours) == codes).float().mean() > 0.999
    torch.testing.assert_close(from_mlx(our_norms), norms, rtol=1e-4, atol=1e-5)
    rotated = from_mlx(integration.rotate(to_mlx(x), 7))
    torch.testing.assert_close(rotated, reference.rotate.reference(x, 7), rtol=1e-4, atol=1e-5)
    back = from_mlx(integration.rotate(to_mlx(rotated), 7, inverse=True))
    torch.testing.assert_close(back, x, rtol=1e-4, atol=1e-4)


def test_attention_is_that_of_this_package():
    """A decode step over k4v4 codes equals transformers' attention over what our codec gives back."""
    generator = torch.Generator().manual_seed(4)
    keys, values = (torch.randn(1, 2, 200, 32, generator=generator) for _ in range(2))
    query = torch.randn(1, 4, 1, 32, generator=generator)
    cache = QuantizedKVCache("k4v4", sink_tokens=2, recent_window=32)
    cache.update_and_fetch(to_mlx(keys[:, :, :199]), to_mlx(values[:, :, :199]))
    rows = cache.update_and_fetch(to_mlx(keys[:, :, 199:]), to_mlx(values[:, :, 199:]))
    found = from_mlx(integration._attention(to_mlx(query), *rows, scale=0.2, mask=None))
    coded = slice(2, 2 + 2 * PAGE)
    for x in (keys, values):
        codes, norms = reference.encode.reference(x[:, :, coded].contiguous(), 4, 0)
        x[:, :, coded] = reference.decode.reference(codes, norms, 4, 32, 0)
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=0.2, enable_gqa=True)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_distributions_are_those_of_the_uncompressed_cache():
    of, ids = model(), tokens(300 + STEPS, batch=2)
    expected = logits(of, ids, mlx_cache.make_prompt_cache(of), 300)
    found = {kv: divergence(logits(of, ids, make_prompt_cache(of, kv), 300), expected) for kv in ("k8v8", "k4v4", "k2v2")}
    assert 0 <= found["k8v8"] < found["k4v4"] < found["k2v2"] < 0.1, found
    assert found["k4v4"] < 5e-3, found


def test_generate_and_prefill_in_chunks():
    of, ids = model(), tokens(300)[0]
    cache = make_prompt_cache(of, "k4v4")
    steps = [token for token, _ in generate_step(ids, of, max_tokens=STEPS, prompt_cache=cache, prefill_step_size=128)]
    assert len(steps) == STEPS
    assert cache[0].offset == 300 + STEPS
    whole = (300 + STEPS - 2 - 1 - 32) // PAGE * PAGE
    assert cache[0].keys.codes.shape[2] == whole
    dense = mlx_cache.make_prompt_cache(of)
    list(generate_step(ids, of, max_tokens=STEPS, prompt_cache=dense))
    assert sum(each.nbytes for each in cache) < sum(each.nbytes for each in dense) / 2.5


def test_other_quantized_caches_keep_their_function():
    of, ids = model(), tokens(100)[0]
    before = [token for token, _ in generate_step(ids, of, max_tokens=3, kv_bits=4, kv_group_size=32)]
    make_prompt_cache(of)
    assert [token for token, _ in generate_step(ids, of, max_tokens=3, kv_bits=4, kv_group_size=32)] == before


@pytest.mark.parametrize("keep", [0, 1, 40, 64, 100, 170, 199, 200])
def test_trim(keep: int):
    cache = QuantizedKVCache("k8v8", recent_window=32)
    x = torch.randn(1, 2, 200, 32, generator=torch.Generator().manual_seed(5))
    cache.update_and_fetch(to_mlx(x), to_mlx(x))
    cache.update_and_fetch(to_mlx(x[:, :, :0]), to_mlx(x[:, :, :0]))
    before = cache.keys.sum(mx.eye(200).reshape(1, 1, 1, 200, 200))
    assert cache.trim(200 - keep) == 200 - keep
    assert cache.offset == keep
    found = cache.keys.sum(mx.eye(keep).reshape(1, 1, 1, keep, keep)) if keep else before[..., :0, :]
    torch.testing.assert_close(from_mlx(found), from_mlx(before[..., :keep, :]), rtol=1e-3, atol=1e-3)


def test_sliding_windows_keep_their_cache():
    args = gemma3_text.ModelArgs(
        "gemma3_text", hidden_size=64, num_hidden_layers=6, intermediate_size=64, num_attention_heads=2, head_dim=32,
        num_key_value_heads=1, vocab_size=300, sliding_window=32,
    )  # fmt: skip
    of = gemma3_text.Model(args)
    cache = make_prompt_cache(of)
    assert [type(each).__name__ for each in cache] == ["RotatingKVCache"] * 5 + ["QuantizedKVCache"]
    ids = tokens(200 + STEPS)
    expected = logits(of, ids, mlx_cache.make_prompt_cache(of), 200)
    assert divergence(logits(of, ids, cache, 200), expected) < 5e-3


def test_refusals():
    for options, message in (
        ({"kv": "k3v3"}, "not supported with MLX"),
        ({"kv": "none"}, "not supported with MLX"),
        ({"recent_window": 0}, "at least 0 and 1"),
    ):
        with pytest.raises(SettingsError, match=message):
            QuantizedKVCache(**options)
    x = mx.zeros((1, 1, 1, 40))
    with pytest.raises(InputError, match="40 channels"):
        QuantizedKVCache().update_and_fetch(x, x)
