"""Settings as they are spelled."""

import pytest

from auraflux.cache import AttentionShape
from auraflux.errors import SettingsError
from auraflux.eval.memory import cache_of, nbytes_at
from auraflux.eval.peers import PEERS
from auraflux.eval.setting import ABLATIONS, parse, parse_all


def test_changes_are_read():
    found = parse("k4v4+newest=32+protect_first=1+sparse_v=1e-4+quantize=3")
    assert (found.cache.kv, found.cache.newest, found.cache.protect_first, found.cache.sparse_v) == ("k4v4", 32, 1, 1e-4)
    assert (found.quantize, found.calibrate) == (3, "all")
    plain = parse("k4v4+newest=0+first=0+calibrate=off")
    assert (plain.cache.plain_newest, plain.cache.plain_first, plain.calibrate) == (0, 0, "off")
    assert parse("fp8+newest=16").peer.newest == 16


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("q5_1", "there is no setting 'q5_1'. Those there are: none, pairs of bits"),
        ("k4v5", "5"),
        ("k4v4+oldest=2", "there is no change 'oldest'. Those there are: first, newest"),
        ("k4v4+newest=few", "newest needs a number, not 'few'"),
        ("k4v4+newest=-1", "newest=-1 is negative"),
        ("k4v4+calibrate=on", "calibrate needs one of all, off, centres, scales, not 'on'"),
        ("none+calibrate=off", "calibrate means nothing where keys are not coded"),
        ("fp8+first=1", "first cannot be simulated for FP8 e4m3"),
        ("k4v4+quantize=7", "cannot be rounded to 7 bits"),
        ("none+newest=32", "newest=32 means nothing with kv='none'"),
        ("fp8+sparse_v=0.1", "sparse_v cannot be simulated for FP8 e4m3"),
        (" , ", "no setting was given"),
    ],
)
def test_what_cannot_be_meant_is_refused(name: str, match: str):
    with pytest.raises(SettingsError, match=match):
        parse_all(name, peers=False, ablations=False)


def test_peers_and_ablations_are_added_once():
    names = [setting.name for setting in parse_all("none,k8v4,fp8", peers=True, ablations=True)]
    assert names == ["none", "k8v4", "fp8", *(f"k8v4+{change}" for change in ABLATIONS), *list(PEERS)[1:]]
    with pytest.raises(SettingsError, match="--ablations changes a compressed cache"):
        parse_all("none,fp8", peers=False, ablations=True)


def test_memory_counts_windows_and_what_newest_keeps():
    shapes = [AttentionShape(2, 64), AttentionShape(2, 64, window=100)]
    plain, coded = (cache_of(parse(name), shapes) for name in ("none", "k4v4+newest=32+first=1"))
    token = 2 * 2 * 64 * 2  # bytes of keys and values of two heads in 16 bits
    assert nbytes_at(plain, 1000) == 1000 * token + 100 * token
    assert nbytes_at(coded, 1000) == (1000 + 100) * 2 * 72 + 2 * (32 + 1) * token
