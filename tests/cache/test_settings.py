"""Cache settings: their effect on each layer, and refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from auraflux.cache import AttentionShape, Cache, CacheSettings, LatentShape, RecurrentShape, SparseLatentShape
from auraflux.cache.settings import parse_kv
from auraflux.defaults import SINK_TOKENS
from auraflux.errors import SettingsError
from auraflux.ops import decode, encode, use_backend
from tests.cache.toy import TOYS, VOCABULARY, vectors

ATTENTION, RECURRENT, LATENT = AttentionShape(2, 64), RecurrentShape(8, 2, 4, 4), LatentShape(64, 8)


def kinds(shapes: list, settings: CacheSettings) -> list[str]:
    return [type(layer).__name__ for layer in Cache(shapes, settings, context=8).layers]


def test_names():
    assert parse_kv("none") is None
    assert [parse_kv(name) for name in ("k8v4", "k4v4", "k4v2", "k3v3", "k6v8")] == [(8, 4), (4, 4), (4, 2), (3, 3), (6, 8)]
    usual = CacheSettings()
    assert (usual.kv, usual.resolved_sink_tokens, usual.resolved_recent_window) == ("k4v4", 1, 32)


@pytest.mark.parametrize("name", ["", "k8", "v4k8", "8-4", "k16v4", "K8V4", "fp8"])
def test_unknown_names_are_refused(name):
    with pytest.raises(SettingsError, match="neither 'none' nor a pair of bits"):
        CacheSettings(name)


@pytest.mark.parametrize("name", ["k5v4", "k8v7", "k1v1", "k0v0"])
def test_bits_without_a_codebook_are_refused(name):
    with pytest.raises(SettingsError, match="2, 3, 4, 6, 8 bits"):
        CacheSettings(name)


def test_each_layer_gets_its_kind():
    shapes = [RECURRENT, ATTENTION, LATENT]
    assert kinds(shapes, CacheSettings("none")) == ["RecurrentLayer", "DenseLayer", "LatentLayer"]
    assert kinds(shapes, CacheSettings("k4v4")) == ["RecurrentLayer", "QuantizedLayer", "QuantizedLatentLayer"]


@pytest.mark.parametrize(("kv", "bits"), [("k8v4", 8), ("k4v4", 4), ("k3v2", 3)])
def test_a_latent_has_the_bits_of_keys(kv, bits):
    cache = Cache([LATENT], CacheSettings(kv), context=8)
    assert cache.layers[0].bits == bits
    assert cache.token_nbytes == 64 * bits // 8 + 4 + 8 * 4


def test_skipped_layers_count_attention_layers_only():
    hybrid = [RECURRENT, RECURRENT, RECURRENT, ATTENTION] * 4
    plan = CacheSettings("k8v4", skip_first_layers=1, skip_last_layers=2).plan(hybrid)
    assert [i for i, bits in enumerate(plan) if bits] == [7]
    assert plan[7] == (8, 4)


def test_skipping_every_layer_is_refused():
    with pytest.raises(SettingsError, match="would quantize nothing: skip_first_layers=1 and skip_last_layers=2 cover all 3"):
        CacheSettings("k8v4", skip_first_layers=1, skip_last_layers=2).plan([ATTENTION] * 3)


def test_recurrent_layers_are_not_quantized():
    assert CacheSettings("k8v4").plan([RECURRENT]) == [None]


@pytest.mark.parametrize(
    ("shape", "kv", "options", "reason"),
    [
        (AttentionShape(2, 64, 32), "k8v4", {}, "keys have width 64 and its values 32"),
        (AttentionShape(2, 4), "k8v4", {}, "width 4 cannot be quantized: the width must be 8 to 1024"),
        (AttentionShape(2, 2048), "k8v4", {}, "width 2048 cannot be quantized"),
        (LATENT, "k4v8", {}, "key and value at once and takes the key's bits, which are fewer than the value's; use k8v8"),
        (LATENT, "k4v4", {"sparse_v": 1e-6}, "sparse_v=1e-06 skips values"),
    ],
)
def test_a_layer_that_cannot_be_quantized_is_named_with_its_reason(shape, kv, options, reason):
    with pytest.raises(SettingsError, match=f"kv='{kv}' is not possible in layer 1: .*{reason}"):
        CacheSettings(kv, **options).plan([RECURRENT, shape])


@pytest.mark.parametrize(
    "option", [{"skip_first_layers": 1}, {"skip_last_layers": 1}, {"sink_tokens": 1}, {"recent_window": 4}, {"sparse_v": 1e-6}]
)
def test_quantization_options_are_refused_without_it(option):
    with pytest.raises(SettingsError, match="has no effect with kv='none'"):
        CacheSettings("none", **option)


@pytest.mark.parametrize(
    "option",
    [
        {"skip_first_layers": -1},
        {"sink_tokens": -1},
        {"recent_window": -1},
        {"sparse_v": float("nan")},
        {"sparse_v": 1.0},
        {"checkpoint_nbytes": -1},
        {"seed": -1},
    ],
)
def test_numbers_that_make_no_sense_are_refused(option):
    with pytest.raises(SettingsError, match=f"{next(iter(option))}="):
        CacheSettings("k8v4", **option)


@pytest.mark.parametrize("recent_window", [0, 4])
def test_sparse_values_reach_the_layers(recent_window):
    shape, tokens = AttentionShape(1, 16), [i * i % VOCABULARY for i in range(23)]

    def found(threshold: float) -> torch.Tensor:
        settings = CacheSettings("k4v4", recent_window=recent_window, sparse_v=threshold)
        with use_backend("reference"):
            return replace(TOYS["recent-window"], shapes=[shape], settings=settings).fresh(tokens)

    torch.testing.assert_close(found(1e-7), found(0.0))
    assert not torch.allclose(found(0.3), found(0.0), atol=1e-2)


def test_sizes_that_make_no_sense_are_refused():
    for option in ({"page": 0}, {"tokens": 0}, {"sequences": -1}, {"rollback_tokens": -1}):
        with pytest.raises(SettingsError, match=f"{next(iter(option))}="):
            Cache([ATTENTION], CacheSettings(), context=8, **option)
    with pytest.raises(SettingsError, match="checkpoint_stride=0"):
        CacheSettings(checkpoint_stride=0)


def test_a_window_within_the_recent_window_stays_in_full_precision():
    shapes = [ATTENTION, AttentionShape(2, 64, window=16)]
    assert kinds(shapes, CacheSettings("k8v4", recent_window=16)) == ["QuantizedLayer", "DenseLayer"]
    assert kinds(shapes, CacheSettings("k8v4", recent_window=15)) == ["QuantizedLayer", "QuantizedLayer"]


@pytest.mark.parametrize("window", [None, 9])
def test_recent_keys_are_read_in_full_precision_and_older_ones_as_codes(window):
    """Compare with plain attention, where each query-key pair selects its copy by distance."""
    shape, recent_window = AttentionShape(1, 16, window=window), 5
    toy = replace(TOYS["recent-window"], shapes=[shape])
    tokens = [i * i % VOCABULARY for i in range(23)]
    k, v = (vectors(seed, 1, 16)[tokens][:, 0] for seed in (1, 2))
    q = vectors(3, 2, 16)[tokens]
    coded_k, coded_v = (decode(*encode(x, 2, 0), 2, 16, 0) for x in (k, v))
    back = torch.arange(23)[:, None] - torch.arange(23)
    near = ((back < recent_window) | (torch.arange(23) < SINK_TOKENS))[:, None]
    scores = torch.where(near, torch.einsum("nhd,td->nht", q, k), torch.einsum("nhd,td->nht", q, coded_k)) / 4
    scores = 20 * torch.tanh(scores / 20)
    scores = scores.masked_fill(((back < 0) | (back >= (window or 99)))[:, None], -torch.inf)
    sinks = torch.linspace(-1, 1, 2).expand(23, 2)[..., None]
    weights = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
    expected = (weights * near) @ v + (weights * ~near) @ coded_v
    with use_backend("reference"):
        found = toy.fresh(tokens)
    torch.testing.assert_close(found, expected.flatten(1), rtol=1e-4, atol=1e-5)


def test_recent_and_sink_latents_are_read_in_full_precision_and_others_as_codes():
    """Compare with plain attention, where each query-latent pair selects its copy by position."""
    sink_tokens, recent_window, shape = 2, 5, LatentShape(16, 4)
    toy = replace(
        TOYS["quantized-latent"],
        shapes=[shape],
        settings=CacheSettings("k2v2", sink_tokens=sink_tokens, recent_window=recent_window),
    )
    tokens = [i * i % VOCABULARY for i in range(23)]
    latent, k_rope = vectors(4, 16)[tokens], vectors(5, 4)[tokens]
    q, q_rope = vectors(6, 3, 16)[tokens], vectors(7, 3, 4)[tokens]
    coded = decode(*encode(latent, 2, 0), 2, 16, 0)
    at = torch.arange(23)
    exact = ((at[:, None] - at < recent_window) | (at < sink_tokens))[:, None]
    scores = torch.where(exact, torch.einsum("nhd,td->nht", q, latent), torch.einsum("nhd,td->nht", q, coded))
    scores = 0.2 * (scores + torch.einsum("nhr,tr->nht", q_rope, k_rope))
    weights = scores.masked_fill((at[:, None] < at)[:, None], -torch.inf).softmax(-1)
    expected = (weights * exact) @ latent + (weights * ~exact) @ coded
    with use_backend("reference"):
        found = toy.fresh(tokens)
    torch.testing.assert_close(found, expected.flatten(1), rtol=1e-4, atol=1e-5)


def test_full_precision_latents_are_counted():
    windows = {"sink_tokens": 1, "recent_window": 32}, {"sink_tokens": 0, "recent_window": 0}
    windowed, bare = (Cache([LATENT] * 2, CacheSettings("k4v4", **window), context=99) for window in windows)
    assert windowed.token_nbytes == bare.token_nbytes
    assert bare.sequence_nbytes == 0
    # 64 floats of each, in two layers
    assert windowed.sequence_nbytes == 2 * 4 * 64 * (1 + 32)


def test_index_keys_take_the_bits_of_latents():
    full, quantized = (Cache([SparseLatentShape(64, 8, 32, 5)], CacheSettings(kv), context=99) for kv in ("none", "k4v4"))
    assert full.token_nbytes == 4 * (64 + 8 + 32)
    assert quantized.token_nbytes == (32 + 4 + 4 * 8) + (16 + 4)
    followed = Cache([SparseLatentShape(64, 8, None, 5)], CacheSettings("k4v4"), context=99)
    assert followed.token_nbytes == 32 + 4 + 4 * 8


@pytest.mark.parametrize(
    ("shape", "settings", "message"),
    [
        (SparseLatentShape(64, 8, 32, 5), {"recent_window": 32}, "leave out --sink-tokens and --recent-window"),
        (SparseLatentShape(64, 8, 32, 5), {"sink_tokens": 1}, "leave out --sink-tokens and --recent-window"),
        (SparseLatentShape(64, 8, 4, 5), {}, "vectors of width 4 cannot be quantized"),
    ],
)
def test_unsupported_settings_of_sparse_latents_are_refused(shape: SparseLatentShape, settings: dict[str, Any], message: str):
    with pytest.raises(SettingsError, match=message):
        Cache([shape], CacheSettings("k4v4", **settings), context=99)
