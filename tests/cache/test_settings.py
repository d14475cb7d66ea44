"""Settings: what they mean for each layer, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from auraflux.cache import AttentionShape, Cache, CacheSettings, LatentShape, RecurrentShape, SparseLatentShape
from auraflux.cache.settings import parse_kv
from auraflux.defaults import FIRST
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
    assert (usual.kv, usual.plain_first, usual.plain_newest) == ("k4v4", 1, 32)


@pytest.mark.parametrize("name", ["", "k8", "v4k8", "8-4", "k16v4", "K8V4", "fp8"])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(SettingsError, match="neither 'none' nor a pair of bits"):
        CacheSettings(name)


@pytest.mark.parametrize("name", ["k5v4", "k8v7", "k1v1", "k0v0"])
def test_bits_without_a_codebook_are_refused(name):
    with pytest.raises(SettingsError, match="2, 3, 4, 6, 8 bits"):
        CacheSettings(name)


def test_each_layer_gets_its_kind():
    shapes = [RECURRENT, ATTENTION, LATENT]
    assert kinds(shapes, CacheSettings("none")) == ["RecurrentLayer", "DenseLayer", "LatentLayer"]
    assert kinds(shapes, CacheSettings("k4v4")) == ["RecurrentLayer", "CodedLayer", "CodedLatentLayer"]


@pytest.mark.parametrize(("kv", "bits"), [("k8v4", 8), ("k4v4", 4), ("k3v2", 3)])
def test_a_latent_has_the_bits_of_keys(kv, bits):
    cache = Cache([LATENT], CacheSettings(kv), context=8)
    assert cache.layers[0].bits == bits
    assert cache.token_nbytes == 64 * bits // 8 + 4 + 8 * 4


def test_protected_layers_are_counted_among_those_that_attend():
    hybrid = [RECURRENT, RECURRENT, RECURRENT, ATTENTION] * 4
    plan = CacheSettings("k8v4", protect_first=1, protect_last=2).plan(hybrid)
    assert [i for i, bits in enumerate(plan) if bits] == [7]
    assert plan[7] == (8, 4)


def test_protecting_everything_is_refused():
    with pytest.raises(SettingsError, match="would compress nothing: protect_first=1 and protect_last=2 cover all 3"):
        CacheSettings("k8v4", protect_first=1, protect_last=2).plan([ATTENTION] * 3)


def test_only_recurrent_layers_have_nothing_to_compress():
    assert CacheSettings("k8v4").plan([RECURRENT]) == [None]


@pytest.mark.parametrize(
    ("shape", "kv", "options", "reason"),
    [
        (AttentionShape(2, 64, 32), "k8v4", {}, "keys are 64 wide and its values 32"),
        (AttentionShape(2, 4), "k8v4", {}, "width 4 have no codes; 8 to 1024"),
        (AttentionShape(2, 2048), "k8v4", {}, "width 2048 have no codes"),
        (LATENT, "k4v8", {}, "key and value at once and is held at the key's bits, too few here; use k8v8"),
        (LATENT, "k4v4", {"sparse_v": 1e-6}, "sparse_v=1e-06 skips values"),
    ],
)
def test_a_layer_that_cannot_is_named_with_its_reason(shape, kv, options, reason):
    with pytest.raises(SettingsError, match=f"kv='{kv}' cannot be honoured in layer 1: .*{reason}"):
        CacheSettings(kv, **options).plan([RECURRENT, shape])


@pytest.mark.parametrize("option", [{"protect_first": 1}, {"protect_last": 1}, {"first": 1}, {"newest": 4}, {"sparse_v": 1e-6}])
def test_options_of_compression_are_refused_without_it(option):
    with pytest.raises(SettingsError, match="means nothing with kv='none'"):
        CacheSettings("none", **option)


@pytest.mark.parametrize(
    "option",
    [
        {"protect_first": -1},
        {"first": -1},
        {"newest": -1},
        {"sparse_v": float("nan")},
        {"sparse_v": 1.0},
        {"checkpoint_nbytes": -1},
        {"seed": -1},
    ],
)
def test_numbers_that_make_no_sense_are_refused(option):
    with pytest.raises(SettingsError, match=f"{next(iter(option))}="):
        CacheSettings("k8v4", **option)


@pytest.mark.parametrize("newest", [0, 4])
def test_sparse_values_reach_the_layers(newest):
    shape, tokens = AttentionShape(1, 16), [i * i % VOCABULARY for i in range(23)]

    def found(threshold: float) -> torch.Tensor:
        settings = CacheSettings("k4v4", newest=newest, sparse_v=threshold)
        with use_backend("reference"):
            return replace(TOYS["newest"], shapes=[shape], settings=settings).fresh(tokens)

    torch.testing.assert_close(found(1e-7), found(0.0))
    assert not torch.allclose(found(0.3), found(0.0), atol=1e-2)


def test_sizes_that_make_no_sense_are_refused():
    for option in ({"page": 0}, {"tokens": 0}, {"sequences": -1}, {"spare": -1}):
        with pytest.raises(SettingsError, match=f"{next(iter(option))}="):
            Cache([ATTENTION], CacheSettings(), context=8, **option)
    with pytest.raises(SettingsError, match="checkpoint_stride=0"):
        CacheSettings(checkpoint_stride=0)


def test_a_window_that_is_newest_as_a_whole_is_kept_uncompressed():
    shapes = [ATTENTION, AttentionShape(2, 64, window=16)]
    assert kinds(shapes, CacheSettings("k8v4", newest=16)) == ["CodedLayer", "DenseLayer"]
    assert kinds(shapes, CacheSettings("k8v4", newest=15)) == ["CodedLayer", "CodedLayer"]


@pytest.mark.parametrize("window", [None, 9])
def test_newest_keys_are_read_as_they_are_and_older_ones_as_codes(window):
    """Against attention written out: each pair of a query and a key chooses by its distance."""
    shape, newest = AttentionShape(1, 16, window=window), 5
    toy = replace(TOYS["newest"], shapes=[shape])
    tokens = [i * i % VOCABULARY for i in range(23)]
    k, v = (vectors(seed, 1, 16)[tokens][:, 0] for seed in (1, 2))
    q = vectors(3, 2, 16)[tokens]
    coded_k, coded_v = (decode(*encode(x, 2, 0), 2, 16, 0) for x in (k, v))
    back = torch.arange(23)[:, None] - torch.arange(23)
    near = ((back < newest) | (torch.arange(23) < FIRST))[:, None]
    scores = torch.where(near, torch.einsum("nhd,td->nht", q, k), torch.einsum("nhd,td->nht", q, coded_k)) / 4
    scores = 20 * torch.tanh(scores / 20)
    scores = scores.masked_fill(((back < 0) | (back >= (window or 99)))[:, None], -torch.inf)
    sinks = torch.linspace(-1, 1, 2).expand(23, 2)[..., None]
    weights = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
    expected = (weights * near) @ v + (weights * ~near) @ coded_v
    with use_backend("reference"):
        found = toy.fresh(tokens)
    torch.testing.assert_close(found, expected.flatten(1), rtol=1e-4, atol=1e-5)


def test_newest_and_first_latents_are_read_as_they_are_and_others_as_codes():
    """Against attention written out: each pair of a query and a latent chooses by its positions."""
    first, newest, shape = 2, 5, LatentShape(16, 4)
    toy = replace(TOYS["coded-latent"], shapes=[shape], settings=CacheSettings("k2v2", first=first, newest=newest))
    tokens = [i * i % VOCABULARY for i in range(23)]
    latent, k_rope = vectors(4, 16)[tokens], vectors(5, 4)[tokens]
    q, q_rope = vectors(6, 3, 16)[tokens], vectors(7, 3, 4)[tokens]
    coded = decode(*encode(latent, 2, 0), 2, 16, 0)
    at = torch.arange(23)
    plain = ((at[:, None] - at < newest) | (at < first))[:, None]
    scores = torch.where(plain, torch.einsum("nhd,td->nht", q, latent), torch.einsum("nhd,td->nht", q, coded))
    scores = 0.2 * (scores + torch.einsum("nhr,tr->nht", q_rope, k_rope))
    weights = scores.masked_fill((at[:, None] < at)[:, None], -torch.inf).softmax(-1)
    expected = (weights * plain) @ latent + (weights * ~plain) @ coded
    with use_backend("reference"):
        found = toy.fresh(tokens)
    torch.testing.assert_close(found, expected.flatten(1), rtol=1e-4, atol=1e-5)


def test_kept_latents_are_counted():
    ways = {"first": 1, "newest": 32}, {"first": 0, "newest": 0}
    kept, bare = (Cache([LATENT] * 2, CacheSettings("k4v4", **plain), context=99) for plain in ways)
    assert kept.token_nbytes == bare.token_nbytes
    assert bare.sequence_nbytes == 0
    # 64 floats of each, in two layers
    assert kept.sequence_nbytes == 2 * 4 * 64 * (1 + 32)


def test_index_keys_take_the_bits_of_latents():
    plain, coded = (Cache([SparseLatentShape(64, 8, 32, 5)], CacheSettings(kv), context=99) for kv in ("none", "k4v4"))
    assert plain.token_nbytes == 4 * (64 + 8 + 32)
    assert coded.token_nbytes == (32 + 4 + 4 * 8) + (16 + 4)
    followed = Cache([SparseLatentShape(64, 8, None, 5)], CacheSettings("k4v4"), context=99)
    assert followed.token_nbytes == 32 + 4 + 4 * 8


@pytest.mark.parametrize(
    ("shape", "settings", "message"),
    [
        (SparseLatentShape(64, 8, 32, 5), {"newest": 32}, "leave --first and --newest out"),
        (SparseLatentShape(64, 8, 32, 5), {"first": 1}, "leave --first and --newest out"),
        (SparseLatentShape(64, 8, 4, 5), {}, "vectors of width 4 have no codes"),
    ],
)
def test_what_chosen_latents_cannot_honour_is_refused(shape: SparseLatentShape, settings: dict[str, Any], message: str):
    with pytest.raises(SettingsError, match=message):
        Cache([shape], CacheSettings("k4v4", **settings), context=99)
