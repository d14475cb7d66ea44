"""Prefix files: a file restores what was saved, and incomplete, damaged or foreign files are never used."""

from pathlib import Path

import pytest
import torch

from auraflux import load
from auraflux.cache.prefix.disk import PARTIAL_SUFFIX, SUFFIX, PrefixDisk, check_folder
from auraflux.cache.prefix.prefix_cache import PrefixCache
from auraflux.errors import SettingsError
from tests.cache.toy import TOYS, Toy

TOKENS = [1, 4, 7, 2, 9, 3, 8, 6, 5, 0, 10, 2, 4, 4, 1]


def written(toy: Toy, folder: Path, tokens: list[int] = TOKENS) -> PrefixDisk:
    """Return a disk with one prefix on it."""
    cache = toy.cache()
    sequence = cache.open()
    toy.add(cache, sequence, tokens)
    disk = PrefixDisk(folder, 1 << 30, "toy")
    store = PrefixCache(cache, disk)
    store.insert(tokens, sequence)
    store.save_all()
    return disk


@pytest.mark.parametrize("toy", TOYS.values(), ids=TOYS)
def test_a_prefix_from_disk_continues_as_if_computed(toy: Toy, tmp_path: Path):
    written(toy, tmp_path)
    cache = toy.cache()
    store = PrefixCache(cache, PrefixDisk(tmp_path, 1 << 30, "toy"))
    prompt = [*TOKENS, 3, 5]
    found = store.fetch(prompt)
    assert found is not None
    store.insert_loaded(prompt, found.result())
    start = store.open(prompt)
    assert start.hit_tokens == len(TOKENS)
    out = toy.add(cache, start.sequence, prompt[start.hit_tokens :])
    torch.testing.assert_close(out, toy.fresh(prompt)[start.hit_tokens :])


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "foreign"])
def test_a_damaged_file_is_dropped(damage: str, tmp_path: Path):
    written(TOYS["dense"], tmp_path)
    (path,) = tmp_path.glob(f"*{SUFFIX}")
    content = bytearray(path.read_bytes())
    before = PrefixDisk(tmp_path, 1 << 30, "toy")
    if damage == "flipped":
        content[-5] ^= 1
    path.write_bytes({"cut": content[:-40], "flipped": content, "emptied": b"", "foreign": b"hello" * 50}[damage])
    # one that indexed it before, and one that scans it damaged
    for disk in (before, PrefixDisk(tmp_path, 1 << 30, "toy")):
        saved, _ = disk.find([*TOKENS, 1], True)
        assert saved is None or disk.load(saved).result() is None
        assert disk.find([*TOKENS, 1], True) == (None, 0)
    assert list(tmp_path.glob(f"*{SUFFIX}")) == []


# within the header, whose JSON contains JSON
FACTS = {
    "length": (rb"length\": 15", rb"length\": 14"),
    "first": (rb"first\": 0", rb"first\": 9"),
    "count": (rb"count\": 2", rb"count\": 9"),
    "kind": (rb"first\": 0", rb"first\":[]"),
    "facts": (b"facts", b"fatcs"),
    "dtype": (b'"F32"', b'"I32"'),
    "ids": (b'"I32","shape":[15]', b'"F32","shape":[15]'),
}


@pytest.mark.parametrize("fact", FACTS)
def test_a_file_with_changed_metadata_is_dropped(fact: str, tmp_path: Path):
    written(TOYS["dense"], tmp_path)
    (path,) = tmp_path.glob(f"*{SUFFIX}")
    content, (old, new) = path.read_bytes(), FACTS[fact]
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    disk = PrefixDisk(tmp_path, 1 << 30, "toy")
    saved, _ = disk.find([*TOKENS, 1], True)
    assert saved is None or disk.load(saved).result() is None
    assert not path.exists()


def test_incomplete_files_and_those_of_other_models_are_ignored(tmp_path: Path):
    written(TOYS["dense"], tmp_path)
    (path,) = tmp_path.glob(f"*{SUFFIX}")
    path.with_suffix(PARTIAL_SUFFIX).write_bytes(path.read_bytes()[:100])
    assert len(PrefixDisk(tmp_path, 1 << 30, "toy")) == 1
    assert list(tmp_path.glob(f"*{PARTIAL_SUFFIX}")) == []
    assert len(PrefixDisk(tmp_path, 1 << 30, "another")) == 0


def test_the_least_recently_used_files_over_the_budget_are_deleted(tmp_path: Path):
    toy = TOYS["dense"]
    cache = toy.cache()
    prompts = [[first, *TOKENS] for first in range(6)]
    one = written(toy, tmp_path, prompts[0]).nbytes
    disk = PrefixDisk(tmp_path, 3 * one + 100, "toy")
    store = PrefixCache(cache, disk)
    for tokens in prompts[1:]:
        sequence = cache.open()
        toy.add(cache, sequence, tokens)
        store.insert(tokens, sequence)
        store.save_all()
        assert disk.nbytes <= disk.limit_nbytes
    assert [disk.find([*tokens, 0], True)[1] for tokens in prompts] == [
        0,
        0,
        0,
        len(prompts[0]),
        len(prompts[0]),
        len(prompts[0]),
    ]
    sizes = [path.stat().st_mode & 0o777 for path in tmp_path.glob(f"*{SUFFIX}")]
    assert sizes == [0o600] * 3


def test_evicted_pages_are_saved_first(tmp_path: Path):
    toy = TOYS["dense"]
    cache = toy.cache(sequences=2, tokens=32)
    disk = PrefixDisk(tmp_path, 1 << 30, "toy")
    store = PrefixCache(cache, disk)
    for tokens in (TOKENS, TOKENS[::-1], [5] * 15):
        sequence = cache.open()
        toy.add(cache, sequence, tokens)
        store.insert(tokens, sequence)
    disk.wait()
    assert disk.find([*TOKENS, 0], True)[1] == len(TOKENS)
    # the entry in memory is shorter now
    assert store.match([*TOKENS, 0])[1] < len(TOKENS)
    found = store.fetch([*TOKENS, 0])
    assert found is not None
    store.insert_loaded([*TOKENS, 0], found.result())
    assert store.match([*TOKENS, 0])[1] == len(TOKENS)


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="prefixes cannot be stored in"):
        PrefixDisk(tmp_path / "file" / "below", 1 << 30, "toy")


def test_a_folder_is_checked_before_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"prefixes cannot be stored in .*: .*file is a file"):
        load("no-such-model", device="cpu", prefix_disk="1GB", prefix_folder=tmp_path / "file" / "below")
    check_folder(tmp_path / "new" / "below")
    assert not (tmp_path / "new").exists()
    # the test may run as root
    monkeypatch.setattr("auraflux.cache.prefix.disk.os.access", lambda folder, how: False)
    with pytest.raises(SettingsError, match=f"{tmp_path} is not writable"):
        check_folder(tmp_path / "new" / "below")
