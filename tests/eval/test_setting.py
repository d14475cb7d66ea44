"""Parsing of settings."""

import pytest

from auraflux.cache import AttentionShape
from auraflux.errors import SettingsError
from auraflux.eval.peers import PEERS
from auraflux.eval.setting import ABLATIONS, cache_of, nbytes_at, parse, parse_all


def test_changes_are_parsed():
    found = parse("k4v4+recent_window=32+skip_first_layers=1+sparse_v=1e-4+quantize=3")
    assert (found.cache.kv, found.cache.recent_window, found.cache.skip_first_layers, found.cache.sparse_v) == (
        "k4v4",
        32,
        1,
        1e-4,
    )
    assert (found.quantize, found.calibrate) == (3, "all")
    plain = parse("k4v4+recent_window=0+sink_tokens=0+calibrate=off")
    assert (plain.cache.resolved_recent_window, plain.cache.resolved_sink_tokens, plain.calibrate) == (0, 0, "off")
    assert parse("fp8+recent_window=16").peer.recent_window == 16


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("q5_1", "there is no setting 'q5_1'. Those there are: none, pairs of bits"),
        ("k4v5", "5"),
        ("k4v4+oldest=2", "there is no change 'oldest'. Those there are: sink_tokens, recent_window"),
        ("k4v4+recent_window=few", "recent_window needs a number, not 'few'"),
        ("k4v4+recent_window=-1", "recent_window=-1 is negative"),
        ("k4v4+calibrate=on", "calibrate needs one of all, off, centres, scales, not 'on'"),
        ("none+calibrate=off", "calibrate has no effect on keys that are not quantized"),
        ("fp8+sink_tokens=1", "sink_tokens cannot be simulated for FP8 e4m3"),
        ("k4v4+quantize=7", "weights cannot be quantized to 7 bits"),
        ("none+recent_window=32", "recent_window=32 has no effect with kv='none'"),
        ("fp8+sparse_v=0.1", "sparse_v cannot be simulated for FP8 e4m3"),
        (" , ", "no setting was given"),
    ],
)
def test_invalid_settings_are_refused(name: str, match: str):
    with pytest.raises(SettingsError, match=match):
        parse_all(name, peers=False, ablations=False)


def test_peers_and_ablations_are_added_once():
    names = [setting.name for setting in parse_all("none,k8v4,fp8", peers=True, ablations=True)]
    assert names == ["none", "k8v4", "fp8", *(f"k8v4+{change}" for change in ABLATIONS), *list(PEERS)[1:]]
    with pytest.raises(SettingsError, match="--ablations changes a compressed cache"):
        parse_all("none,fp8", peers=False, ablations=True)


def test_memory_counts_windows_and_full_precision_tokens():
    shapes = [AttentionShape(2, 64), AttentionShape(2, 64, window=100)]
    uncompressed, quantized = (cache_of(parse(name), shapes) for name in ("none", "k4v4+recent_window=32+sink_tokens=1"))
    token = 2 * 2 * 64 * 2  # bytes of keys and values of two heads in 16 bits
    assert nbytes_at(uncompressed, 1000) == 1000 * token + 100 * token
    assert nbytes_at(quantized, 1000) == (1000 + 100) * 2 * 72 + 2 * (32 + 1) * token
