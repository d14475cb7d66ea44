"""Quantization of other engines: compared with their formulas, and with the engines where installed."""

import math
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch

from auraflux.cache import AttentionShape, Cache, CacheSettings, LatentShape
from auraflux.errors import SettingsError
from auraflux.eval.peers import PEERS, fp8, hadamard, kivi, mlx, q4_0, q4_0_hadamard
from auraflux.eval.rounded import rounded_shapes


def vectors(count: int = 5, width: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    found = torch.randn(count, width, generator=generator) * torch.logspace(-3, 2, count)[:, None]
    found[0, :32] = 0
    return found


def half(x: float) -> float:
    return float(np.float16(x))


def e4m3(x: float) -> float:
    """Round to 3 bits of mantissa, exponents from -6, at most 448; ties to even."""
    if x == 0:
        return 0.0
    step = 2.0 ** (max(math.floor(math.log2(abs(x))), -6) - 3)
    return math.copysign(min(round(abs(x) / step) * step, 448.0), x)


def test_fp8_rounds_to_nearest():
    values = [*vectors().flatten().tolist(), 448.0, 449.0, 1e6, -1e6, 0.001, 2.0**-9, 2.0**-10]
    assert fp8(torch.tensor(values)).tolist() == [e4m3(value) for value in values]


def test_q4_0_matches_the_formula():
    x = vectors()
    for row, found in zip(x.tolist(), q4_0(x).tolist(), strict=True):
        for start in range(0, 64, 32):
            block = row[start : start + 32]
            scale = np.float32(max(block, key=abs)) / np.float32(-8)
            inverse = np.float32(1) / scale if scale else np.float32(0)
            codes = [min(15, int(np.float32(value) * inverse + np.float32(8.5))) for value in block]
            assert found[start : start + 32] == pytest.approx([half(scale) * (code - 8) for code in codes])


def test_q4_0_matches_gguf():
    x, kind = vectors(), gguf.GGMLQuantizationType.Q4_0
    wanted = gguf.quants.dequantize(gguf.quants.quantize(x.numpy(), kind), kind)
    assert torch.equal(q4_0(x), torch.from_numpy(wanted))


@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_matches_the_formula(bits: int):
    x = vectors()
    for row, found in zip(x.tolist(), kivi(bits)(x).tolist(), strict=True):
        for start in range(0, 64, 32):
            group = np.array(row[start : start + 32], np.float32)
            low, step = half(group.min()), half((group.max() - group.min()) / (2**bits - 1))
            codes = [0 if step == 0 else round(min(max((value - low) / step, 0), 2**bits - 1)) for value in group.tolist()]
            assert found[start : start + 32] == pytest.approx([low + step * code for code in codes], rel=1e-4, abs=1e-6)


def test_mlx_matches_mlx():
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    x = vectors()
    codes = mx.quantize(mx.array(x.numpy()).astype(mx.float16), group_size=64, bits=4)
    wanted = np.array(mx.dequantize(*(codes[0], *(part.astype(mx.float32) for part in codes[1:])), group_size=64, bits=4))
    assert mlx(4)(x).numpy() == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("width", [64, 96, 256])
def test_hadamard_is_an_orthogonal_involution(width: int):
    x = torch.randn(3, width)
    assert torch.allclose(hadamard(hadamard(x)), x, atol=1e-5)
    assert torch.allclose(hadamard(x).norm(dim=-1), x.norm(dim=-1), rtol=1e-5)
    first = hadamard(torch.eye(width)[:1])[0]
    size = width & -width
    assert torch.allclose(first[:size], torch.full((size,), size**-0.5))
    assert not first[size:].any()


def test_hadamard_reduces_the_error_of_an_outlier():
    x = torch.randn(100, 64) * 0.1
    x[:, 7] = 10
    direct, rotated = ((rounded(x) - x)[:, :7].norm() for rounded in (q4_0, q4_0_hadamard))
    assert rotated < direct


@pytest.mark.parametrize(
    ("name", "nbytes"), [("fp8", 128), ("q4_0", 72), ("q4_0-hadamard", 72), ("kivi4", 80), ("kivi2", 48), ("mlx4", 72)]
)
def test_bytes_per_head_and_token(name: str, nbytes: int):
    cache = Cache(rounded_shapes([AttentionShape(1, 64)], PEERS[name]), CacheSettings("none"), context=64)
    assert cache.token_nbytes == nbytes


def read_back(name: str, chunks: list[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    cache = Cache(rounded_shapes([AttentionShape(1, 64)], PEERS[name]), CacheSettings("none"), context=200)
    batch, out, at = cache.batch([cache.open()]), [], 0
    for new in chunks:
        batch.extend([new])
        mine = slice(at, at + new)
        cache.layers[0].append(batch, k[mine], v[mine])
        out.append(cache.layers[0].attend(batch, q[mine], 0.125))
        at += new
    return torch.cat(out)


@pytest.mark.parametrize("name", PEERS)
def test_a_simulated_cache_does_not_depend_on_prefill_chunks(name: str):
    q, k, v = torch.randn(3, 150, 1, 64).unbind(0)
    expected = read_back(name, [150], q, k, v)
    assert torch.allclose(read_back(name, [33, 1, 64, 30, 22], q, k, v), expected, atol=1e-5)


def test_kivi_quantizes_old_keys_by_channel_and_recent_ones_not():
    q, k, v = torch.randn(3, 150, 1, 64).unbind(0)
    rounded = kivi(4)
    quantized = k.clone()
    for start in range(0, 128, 32):
        quantized[start : start + 32, 0] = rounded(k[start : start + 32, 0].T.contiguous()).T
    found = read_back("kivi4", [150], q, k, v)
    for at in (10, 40, 149):
        near = torch.arange(at + 1) > at - 32
        keys = torch.where(near[:, None], k[: at + 1, 0], quantized[: at + 1, 0])
        values = torch.where(near[:, None], v[: at + 1, 0], rounded(v[: at + 1, 0]))
        wanted = torch.softmax(keys @ q[at, 0] * 0.125, 0) @ values
        assert torch.allclose(found[at, 0], wanted, atol=1e-5)


def test_unsupported_layers_are_refused():
    with pytest.raises(SettingsError, match=r"KIVI, 4 bits cannot be simulated in layer 1: its heads are 80 wide"):
        rounded_shapes([AttentionShape(1, 64), AttentionShape(1, 80)], PEERS["kivi4"])
    with pytest.raises(SettingsError, match="KIVI, 4 bits is simulated for keys and values of heads, and layer 0 is latent"):
        rounded_shapes([LatentShape(64, 32)], PEERS["kivi4"])


def test_latents_are_rounded_when_stored():
    rotation = SimpleNamespace(frequencies=torch.rand(8), mscale=1.0, interleaved=True)
    heads, nope, stored = 2, 24, []
    for shapes in ([LatentShape(64, 16)], rounded_shapes([LatentShape(64, 16)], PEERS["fp8"])):
        torch.manual_seed(0)
        cache = Cache(shapes, CacheSettings("none"), context=200)
        batch = cache.batch([cache.open(), cache.open()])
        for counts in ([40, 3], [1, 30]):
            batch.extend(counts)
            q, kv = torch.randn(sum(counts), heads * (nope + 16)), torch.randn(sum(counts), 64 + 16)
            cache.layers[0].rope_append(batch, q, kv, heads, nope, rotation, torch.ones(64), 1e-6)
        stored.append(cache.layers[0])
    uncompressed, rounded = stored
    assert rounded.token_nbytes == 80
    for given, found in ((uncompressed.latent, rounded.latent), (uncompressed.rope, rounded.rope)):
        assert found.equal(fp8(given))
