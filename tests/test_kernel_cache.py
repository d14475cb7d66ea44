"""The folder of compiled kernels: never another's, never a reason to fail, and spoiled files are compiled anew."""

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from auraflux import kernel_cache
from auraflux.errors import SettingsError
from auraflux.kernel_cache import kept_in, open_folder
from auraflux.machine import cache_folder, cache_home

VERSION = "0123456789abcdef"
NAMES = ("XDG_CACHE_HOME", "AURAFLUX_CACHE", "HOME")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AURAFLUX_CACHE", str(tmp_path / "cache"))
    kernel_cache._said.clear()
    return tmp_path / "cache"


def refused(caplog: pytest.LogCaptureFixture) -> str:
    """The one sentence that is said where no folder can be used."""
    caplog.clear()
    assert open_folder(VERSION) == ""
    assert len(caplog.records) == 1
    said = caplog.messages[0]
    assert said.startswith("Compiled kernels are not kept, so every run compiles them anew: ")
    assert "\n" not in said
    return said


@pytest.mark.parametrize("value", ["", "relative", "./here", "~/x"])
def test_what_is_no_absolute_path_is_ignored_as_xdg_says(value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AURAFLUX_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_home() == Path("/home/somebody/.cache")
    assert cache_folder() == Path("/home/somebody/.cache/auraflux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_folder() == Path("/var/cache/auraflux")


def test_the_working_folder_is_no_home(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.delenv("AURAFLUX_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "relative")
    with pytest.raises(SettingsError, match="no home folder"):
        cache_home()
    assert "no home folder" in refused(caplog)
    monkeypatch.setenv("AURAFLUX_CACHE", "relative")
    assert "AURAFLUX_CACHE='relative' is not an absolute path" in refused(caplog)


def test_a_folder_is_made_for_this_user_alone(base: Path, caplog: pytest.LogCaptureFixture):
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
def test_a_folder_that_others_may_write_to_is_not_used(base: Path, part: str, caplog: pytest.LogCaptureFixture):
    open_folder(VERSION)
    (base / part).chmod(0o777)
    assert f"other users may write to {base / part}" in refused(caplog)
    (base / part).chmod(0o700)
    assert open_folder(VERSION)


@pytest.mark.parametrize("part", [".", "numba", f"numba/{VERSION}"])
def test_a_folder_of_another_user_is_not_used(base: Path, part: str, caplog, monkeypatch):
    open_folder(VERSION)
    if os.geteuid() == 0:
        os.chown(base / part, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert "belongs to another user" in refused(caplog)


def test_what_stands_in_the_way_is_one_sentence(base: Path, caplog, monkeypatch):
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


def test_only_old_versions_are_removed(base: Path):
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


def compiled(folder: str):
    """A function that is compiled, or found where it is kept, when it is first called."""

    def twice(x):
        return 2 * x

    with kept_in(folder):
        return numba.njit(cache=True)(twice)


def hits(folder: str) -> int:
    function = compiled(folder)
    assert function(21) == 42
    return sum(function.stats.cache_hits.values())


def test_kernels_are_kept(base: Path):
    folder = open_folder(VERSION)
    assert [hits(folder), hits(folder)] == [0, 1]
    assert hits("") == 0


@pytest.mark.parametrize(
    "content", [b"", b"\x80", b"garbage", b"\x80\x04N.", None], ids=["empty", "cut", "text", "other", "half"]
)
def test_spoiled_files_are_compiled_anew(base: Path, content: bytes | None, caplog):
    folder = open_folder(VERSION)
    hits(folder)
    spoiled = next(Path(folder).rglob("*.nbc"))
    whole = spoiled.read_bytes()
    spoiled.write_bytes(whole[: len(whole) // 2] if content is None else content)
    assert [hits(folder), hits(folder)] == [0, 1]
    assert caplog.records == []


def test_processes_that_compile_at_once_do_not_mix_their_files_up(base: Path):
    folder = open_folder(VERSION)

    def added(number: int):
        def add(x):
            return x + number

        with kept_in(folder):
            return numba.njit(cache=True)(add)

    # both look before either has written
    one, two = added(1), added(2)
    assert (one(10), two(10)) == (11, 12)
    again = added(1), added(2)
    assert (again[0](10), again[1](10)) == (11, 12)
    assert [sum(each.stats.cache_hits.values()) for each in again] == [1, 1]
    assert len(list(Path(folder).rglob("*.nbc"))) == 2


def test_machine_code_that_was_changed_is_not_run(base: Path):
    folder = open_folder(VERSION)
    hits(folder)
    changed = next(Path(folder).rglob("*.nbc"))
    octets = bytearray(changed.read_bytes())
    octets[len(octets) // 2] ^= 1
    changed.write_bytes(octets)
    assert [hits(folder), hits(folder)] == [0, 1]


def test_a_full_disk_is_said_once(base: Path, caplog, monkeypatch):
    folder = open_folder(VERSION)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(kernel_cache._Files, "_open_for_write", full)
        assert [hits(folder), hits(folder)] == [0, 0]
    assert [message.partition(": ")[2] for message in caplog.messages] == ["No space left on device."]
    assert [hits(folder), hits(folder)] == [0, 1]


def test_a_folder_that_goes_away_is_no_failure(base: Path):
    folder = open_folder(VERSION)
    function = compiled(folder)
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
    kept = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = [sys.executable, "-c", CODE]
    return subprocess.run(command, env=kept | environment, cwd=tmp_path, capture_output=True, text=True)


def test_every_command_works_without_a_cache(tmp_path: Path):
    path = os.pathsep.join(each for each in sys.path if each)
    done = run(tmp_path, HOME="/proc/nobody", PYTHONPATH=path)
    assert done.stdout == "''\n9.0\n"
    assert done.stderr.startswith("Compiled kernels are not kept")
    assert done.stderr.count("\n") == 1
    done = run(tmp_path, HOME=str(tmp_path), XDG_CACHE_HOME="", PYTHONPATH=path)
    assert done.stdout.startswith(f"'{tmp_path}/.cache/auraflux/numba/")
    assert done.stderr == ""
    assert not (tmp_path / "auraflux").exists()
