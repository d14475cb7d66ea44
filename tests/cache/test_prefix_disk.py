"""Prefixes on disk: what comes back is what was there, and what is torn, changed or another's is never used."""

from pathlib import Path

import pytest
import torch

from auraflux import load
from auraflux.cache.prefix import PrefixStore
from auraflux.cache.prefix_disk import ENDING, UNFINISHED, PrefixDisk, check_folder
from auraflux.errors import SettingsError
from tests.cache.toy import TOYS, Toy

TEXT = [1, 4, 7, 2, 9, 3, 8, 6, 5, 0, 10, 2, 4, 4, 1]


def written(toy: Toy, folder: Path, text: list[int] = TEXT) -> PrefixDisk:
    """A disk with one text on it."""
    cache = toy.cache()
    sequence = cache.open()
    toy.add(cache, sequence, text)
    disk = PrefixDisk(folder, 1 << 30, "toy")
    store = PrefixStore(cache, disk)
    store.keep(text, sequence)
    store.save_all()
    return disk


@pytest.mark.parametrize("toy", TOYS.values(), ids=TOYS)
def test_a_text_from_disk_goes_on_as_it_would_have(toy: Toy, tmp_path: Path):
    written(toy, tmp_path)
    cache = toy.cache()
    store = PrefixStore(cache, PrefixDisk(tmp_path, 1 << 30, "toy"))
    prompt = [*TEXT, 3, 5]
    found = store.fetch(prompt)
    assert found is not None
    store.take_in(prompt, found.result())
    start = store.open(prompt)
    assert start.held == len(TEXT)
    out = toy.add(cache, start.sequence, prompt[start.held :])
    torch.testing.assert_close(out, toy.fresh(prompt)[start.held :])


@pytest.mark.parametrize("harm", ["cut", "flipped", "emptied", "foreign"])
def test_a_file_that_is_not_what_was_written_is_dropped(harm: str, tmp_path: Path):
    written(TOYS["dense"], tmp_path)
    (path,) = tmp_path.glob(f"*{ENDING}")
    content = bytearray(path.read_bytes())
    stock = PrefixDisk(tmp_path, 1 << 30, "toy")
    if harm == "flipped":
        content[-5] ^= 1
    path.write_bytes({"cut": content[:-40], "flipped": content, "emptied": b"", "foreign": b"hello" * 50}[harm])
    # one that knew it before, and one that finds it so
    for disk in (stock, PrefixDisk(tmp_path, 1 << 30, "toy")):
        saved, _ = disk.find([*TEXT, 1], True)
        assert saved is None or disk.load(saved).result() is None
        assert disk.find([*TEXT, 1], True) == (None, 0)
    assert list(tmp_path.glob(f"*{ENDING}")) == []


# within the header, where JSON stands in JSON
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
def test_a_file_that_says_something_else_is_dropped(fact: str, tmp_path: Path):
    written(TOYS["dense"], tmp_path)
    (path,) = tmp_path.glob(f"*{ENDING}")
    content, (old, new) = path.read_bytes(), FACTS[fact]
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    disk = PrefixDisk(tmp_path, 1 << 30, "toy")
    saved, _ = disk.find([*TEXT, 1], True)
    assert saved is None or disk.load(saved).result() is None
    assert not path.exists()


def test_what_was_broken_off_and_what_is_another_models_is_not_seen(tmp_path: Path):
    written(TOYS["dense"], tmp_path)
    (path,) = tmp_path.glob(f"*{ENDING}")
    path.with_suffix(UNFINISHED).write_bytes(path.read_bytes()[:100])
    assert len(PrefixDisk(tmp_path, 1 << 30, "toy")) == 1
    assert list(tmp_path.glob(f"*{UNFINISHED}")) == []
    assert len(PrefixDisk(tmp_path, 1 << 30, "another")) == 0


def test_the_budget_holds_and_the_oldest_go(tmp_path: Path):
    toy = TOYS["dense"]
    cache = toy.cache()
    texts = [[first, *TEXT] for first in range(6)]
    one = written(toy, tmp_path, texts[0]).nbytes
    disk = PrefixDisk(tmp_path, 3 * one + 100, "toy")
    store = PrefixStore(cache, disk)
    for text in texts[1:]:
        sequence = cache.open()
        toy.add(cache, sequence, text)
        store.keep(text, sequence)
        store.save_all()
        assert disk.nbytes <= disk.limit_nbytes
    assert [disk.find([*text, 0], True)[1] for text in texts] == [0, 0, 0, len(texts[0]), len(texts[0]), len(texts[0])]
    sizes = [path.stat().st_mode & 0o777 for path in tmp_path.glob(f"*{ENDING}")]
    assert sizes == [0o600] * 3


def test_pages_that_are_wanted_go_to_disk_first(tmp_path: Path):
    toy = TOYS["dense"]
    cache = toy.cache(sequences=2, tokens=32)
    disk = PrefixDisk(tmp_path, 1 << 30, "toy")
    store = PrefixStore(cache, disk)
    for text in (TEXT, TEXT[::-1], [5] * 15):
        sequence = cache.open()
        toy.add(cache, sequence, text)
        store.keep(text, sequence)
    disk.wait()
    assert disk.find([*TEXT, 0], True)[1] == len(TEXT)
    # the memory of it is shorter now
    assert store.look([*TEXT, 0])[1] < len(TEXT)
    found = store.fetch([*TEXT, 0])
    assert found is not None
    store.take_in([*TEXT, 0], found.result())
    assert store.look([*TEXT, 0])[1] == len(TEXT)


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="prefixes cannot be kept in"):
        PrefixDisk(tmp_path / "file" / "below", 1 << 30, "toy")


def test_a_folder_is_looked_at_before_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"prefixes cannot be kept in .*: .*file is a file"):
        load("a model that there is not", device="cpu", prefix_disk="1GB", prefix_folder=tmp_path / "file" / "below")
    check_folder(tmp_path / "new" / "below")
    assert not (tmp_path / "new").exists()
    # whoever runs this may be allowed everything
    monkeypatch.setattr("auraflux.cache.prefix_disk.os.access", lambda folder, how: False)
    with pytest.raises(SettingsError, match=f"{tmp_path} may not be written to"):
        check_folder(tmp_path / "new" / "below")
