"""The JIT cache folder: private to the user, never a reason to fail, and corrupt files are recompiled."""

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from auraflux import jit_cache
from auraflux.errors import SettingsError
from auraflux.jit_cache import cached_in, open_folder
from auraflux.machine import cache_folder, cache_home

VERSION = "0123456789abcdef"
NAMES = ("XDG_CACHE_HOME", "AURAFLUX_CACHE", "HOME")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AURAFLUX_CACHE", str(tmp_path / "cache"))
    jit_cache._said.clear()
    return tmp_path / "cache"


def refused(caplog: pytest.LogCaptureFixture) -> str:
    """Return the one-sentence warning without a usable folder."""
    caplog.clear()
    assert open_folder(VERSION) == ""
    assert len(caplog.records) == 1
    warning = caplog.messages[0]
    assert warning.startswith("The JIT cache is off, so every run compiles its kernels again: ")
    assert "\n" not in warning
    return warning


@pytest.mark.parametrize("value", ["", "relative", "./here", "~/x"])
def test_relative_xdg_cache_home_is_ignored(value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AURAFLUX_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_home() == Path("/home/somebody/.cache")
    assert cache_folder() == Path("/home/somebody/.cache/auraflux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_folder() == Path("/var/cache/auraflux")


def test_relative_home_and_cache_are_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.delenv("AURAFLUX_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "relative")
    with pytest.raises(SettingsError, match="no home folder"):
        cache_home()
    assert "no home folder" in refused(caplog)
    monkeypatch.setenv("AURAFLUX_CACHE", "relative")
    assert "AURAFLUX_CACHE='relative' is not an absolute path" in refused(caplog)


def test_folder_is_private_to_the_user(base: Path, caplog: pytest.LogCaptureFixture):
    before = os.umask(0)
    try:
        folder = open_folder(VERSION)
    finally:
        os.umask(before)
    assert folder == str(base / "numba" / VERSION)
    for made in (base, base / "numba", Path(folder)):
        assert made.stat().st_mode & 0o777 == 0o700
    assert caplog.records == []


@pytest.mark.parametrize("part", [".", "numba", f"numba/{VERSION}"])
def test_folder_writable_by_others_is_not_used(base: Path, part: str, caplog: pytest.LogCaptureFixture):
    open_folder(VERSION)
    (base / part).chmod(0o777)
    assert f"other users may write to {base / part}" in refused(caplog)
    (base / part).chmod(0o700)
    assert open_folder(VERSION)


@pytest.mark.parametrize("part", [".", "numba", f"numba/{VERSION}"])
def test_folder_of_another_user_is_not_used(base: Path, part: str, caplog, monkeypatch):
    open_folder(VERSION)
    if os.geteuid() == 0:
        os.chown(base / part, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert "belongs to another user" in refused(caplog)


def test_unusable_folder_is_a_one_sentence_warning(base: Path, caplog, monkeypatch):
    base.write_text("")
    assert "File exists" in refused(caplog)
    base.unlink()
    base.symlink_to(base.parent / "nowhere")
    assert "File exists" in refused(caplog)
    base.unlink()
    monkeypatch.setenv("AURAFLUX_CACHE", "/proc/nothing/here")
    assert "/proc/nothing" in refused(caplog)
    monkeypatch.setenv("AURAFLUX_CACHE", "/" + "x" * 300)
    assert "File name too long" in refused(caplog)
    monkeypatch.setenv("AURAFLUX_CACHE", str(base))
    base.mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "cannot be written" in refused(caplog)


def test_only_old_versions_are_evicted(base: Path):
    numba_folder = base / "numba"
    numba_folder.mkdir(parents=True, mode=0o700)
    base.chmod(0o700)
    for number in range(7):
        old = numba_folder / f"{number:016x}"
        old.mkdir()
        os.utime(old, (number, number))
    others = [numba_folder / "photos", numba_folder / "0123456789ABCDEF", numba_folder / ("f" * 17)]
    for other in others:
        other.mkdir()
    (numba_folder / ("e" * 16)).write_text("a file")
    elsewhere = base.parent / "elsewhere"
    elsewhere.mkdir()
    (numba_folder / ("d" * 16)).symlink_to(elsewhere)
    open_folder(VERSION)
    left = {path.name for path in numba_folder.iterdir()}
    assert left == {VERSION, *(f"{n:016x}" for n in (4, 5, 6)), *(other.name for other in others), "e" * 16, "d" * 16}
    assert elsewhere.exists()


def compiled_function(folder: str):
    """Return a function that is compiled, or loaded from the cache, on its first call."""

    def twice(x):
        return 2 * x

    with cached_in(folder):
        return numba.njit(cache=True)(twice)


def hits(folder: str) -> int:
    function = compiled_function(folder)
    assert function(21) == 42
    return sum(function.stats.cache_hits.values())


def test_kernels_are_cached(base: Path):
    folder = open_folder(VERSION)
    assert [hits(folder), hits(folder)] == [0, 1]
    assert hits("") == 0


@pytest.mark.parametrize(
    "content", [b"", b"\x80", b"garbage", b"\x80\x04N.", None], ids=["empty", "cut", "text", "other", "half"]
)
def test_corrupt_files_are_recompiled(base: Path, content: bytes | None, caplog):
    folder = open_folder(VERSION)
    hits(folder)
    corrupt = next(Path(folder).rglob("*.nbc"))
    content_before = corrupt.read_bytes()
    corrupt.write_bytes(content_before[: len(content_before) // 2] if content is None else content)
    assert [hits(folder), hits(folder)] == [0, 1]
    assert caplog.records == []


def test_concurrent_compilation_does_not_mix_files(base: Path):
    folder = open_folder(VERSION)

    def added(number: int):
        def add(x):
            return x + number

        with cached_in(folder):
            return numba.njit(cache=True)(add)

    # both look up before either has saved
    one, two = added(1), added(2)
    assert (one(10), two(10)) == (11, 12)
    again = added(1), added(2)
    assert (again[0](10), again[1](10)) == (11, 12)
    assert [sum(each.stats.cache_hits.values()) for each in again] == [1, 1]
    assert len(list(Path(folder).rglob("*.nbc"))) == 2


def test_modified_machine_code_is_not_run(base: Path):
    folder = open_folder(VERSION)
    hits(folder)
    changed = next(Path(folder).rglob("*.nbc"))
    octets = bytearray(changed.read_bytes())
    octets[len(octets) // 2] ^= 1
    changed.write_bytes(octets)
    assert [hits(folder), hits(folder)] == [0, 1]


def test_full_disk_is_logged_once(base: Path, caplog, monkeypatch):
    folder = open_folder(VERSION)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(jit_cache._Files, "_open_for_write", full)
        assert [hits(folder), hits(folder)] == [0, 0]
    assert [message.partition(": ")[2] for message in caplog.messages] == ["No space left on device."]
    assert [hits(folder), hits(folder)] == [0, 1]


def test_removed_folder_is_not_an_error(base: Path):
    folder = open_folder(VERSION)
    function = compiled_function(folder)
    base.rename(base.with_name("moved"))
    base.write_text("")
    assert function(4) == 8
    assert hits(folder) == 0


CODE = """
import torch
from auraflux.ops import relu_square
from auraflux.ops.simd import jit
print(repr(jit.CACHE_FOLDER))
print(relu_square(torch.tensor([[3.0]])).item())
"""


def run(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment_of_user = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = [sys.executable, "-c", CODE]
    return subprocess.run(command, env=environment_of_user | environment, cwd=tmp_path, capture_output=True, text=True)


def test_commands_work_without_a_cache(tmp_path: Path):
    path = os.pathsep.join(each for each in sys.path if each)
    done = run(tmp_path, HOME="/proc/nobody", PYTHONPATH=path)
    assert done.stdout == "''\n9.0\n"
    assert done.stderr.startswith("The JIT cache is off")
    assert done.stderr.count("\n") == 1
    done = run(tmp_path, HOME=str(tmp_path), XDG_CACHE_HOME="", PYTHONPATH=path)
    assert done.stdout.startswith(f"'{tmp_path}/.cache/auraflux/numba/")
    assert done.stderr == ""
    assert not (tmp_path / "auraflux").exists()
