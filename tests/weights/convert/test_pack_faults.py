"""Interrupted runs of `pack`: complete files are reused, and the result is identical."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from auraflux.errors import FormatError
from auraflux.weights.convert import expert_packer
from auraflux.weights.convert.journal import NAME, Journal
from tests.weights.experts.packed_folders import contents, experts_of, hf_folder, packed

OPTIONS = {"bits": 4, "group": 32}

KILLED = """
import os, signal, sys
from pathlib import Path
from auraflux.models import family
from auraflux.ops.simd.isa import ISA
from auraflux.weights.convert import expert_packer
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.convert.pack import pack

calls, write = 0, expert_packer._write_all
def stop(file, data, offset):
    global calls
    calls += 1
    if calls == int(sys.argv[3]):
        write(file, data[:5000], offset)
        os.kill(os.getpid(), signal.SIGKILL)
    write(file, data, offset)
expert_packer._write_all = stop
checkpoint = open_checkpoint(sys.argv[1])
pack(checkpoint, family(checkpoint.config), Path(sys.argv[2]), lanes=ISA.lanes, bits=4, group=32)
"""


def kill_while_packing(source: Path, target: Path, call: int) -> None:
    command = [sys.executable, "-c", KILLED, str(source), str(target), str(call)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_killed_run_is_resumed(tmp_path):
    source = hf_folder(tmp_path / "hf")
    wanted = contents(packed(source, tmp_path / "whole", **OPTIONS))
    kill_while_packing(source, tmp_path / "packed", 8)
    part = tmp_path / "packed.partial"
    assert not (tmp_path / "packed").exists()
    assert not (part / "experts" / "manifest.json").exists()
    names = sorted(path.name for path in (part / "experts").iterdir())
    assert names == ["layer_000.bin", "layer_002.bin.partial"]
    before = {path: path.stat().st_mtime_ns for path in (part / "experts" / "layer_000.bin", part / "model.safetensors")}
    # a truncated line in the journal and a truncated file
    with (part / NAME).open("ab") as file:
        file.write(b'{"file": "layer_002.bin", "nb')
    times = {}
    folder = packed(source, tmp_path / "packed", **OPTIONS)
    for path in before:
        times[path] = (folder / path.relative_to(part)).stat().st_mtime_ns
    assert times == before
    assert contents(folder) == wanted
    assert not part.exists()


@pytest.fixture
def stopped(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """Return a model, and the target of a run that failed on a full disk."""
    source = hf_folder(tmp_path / "hf")
    calls, write = 0, os.pwrite

    def full(file: int, data: memoryview, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise OSError(28, "No space left on device")
        return write(file, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(expert_packer.os, "pwrite", full)
        with pytest.raises(FormatError, match=r"packed cannot be written: No space left on device\. Progress is saved in "):
            packed(source, tmp_path / "packed", **OPTIONS)
    return source, tmp_path / "packed"


def test_full_disk_raises_and_the_run_can_resume(stopped, tmp_path):
    source, target = stopped
    assert not target.exists()
    seen = []
    packed(source, target, **OPTIONS, report=lambda what, done, total: seen.append((what, done, total)))
    # the first layer and all non-expert weights were complete
    assert seen[0] == ("experts", seen[0][2] // 2, seen[0][2])
    assert seen[-1] == ("experts", seen[0][2], seen[0][2])
    assert {what for what, _, _ in seen} == {"experts"}
    assert contents(target) == contents(packed(source, tmp_path / "whole", **OPTIONS))


def test_changed_model_is_detected(stopped):
    source, target = stopped
    os.utime(source / "model.safetensors", ns=(1, 1))
    with pytest.raises(FormatError, match=r"the model has changed since .*packed\.partial was started\. Use --force"):
        packed(source, target, **OPTIONS)
    packed(source, target, **OPTIONS, force=True)
    experts_of(target)


def test_other_settings_are_detected(stopped):
    source, target = stopped
    with pytest.raises(FormatError, match=r"was started with other settings \(bits 4\)\. Use the same, or --force"):
        packed(source, target, bits=8, group=32)


def test_truncated_layer_is_rewritten(stopped, tmp_path):
    source, target = stopped
    with (tmp_path / "packed.partial" / "experts" / "layer_000.bin").open("r+b") as file:
        file.truncate(100)
    assert contents(packed(source, target, **OPTIONS)) == contents(packed(source, tmp_path / "whole", **OPTIONS))


@pytest.mark.parametrize("line", [b"{}", b'{"file": "layer_000.bin"}', b'{"file": 1, "nbytes": []}', b"5"])
def test_modified_journal_is_ignored(line: bytes, stopped, tmp_path):
    source, target = stopped
    journal = tmp_path / "packed.partial" / NAME
    head, *_ = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(head + line + b" 00000000\n")
    assert contents(packed(source, target, **OPTIONS)) == contents(packed(source, tmp_path / "whole", **OPTIONS))


def test_repeated_journal_line_is_ignored(tmp_path):
    head, entry = {"source": "a"}, {"file": "layer_000.bin"}
    journal = Journal(tmp_path / "new", head)
    journal.add(entry)
    journal.close()
    path = tmp_path / "new" / NAME
    first, second = path.read_bytes().splitlines(keepends=True)
    for lines in ([first, second, second], [first, second, first], [first, second, second[second.rindex(b" ") :]]):
        path.write_bytes(b"".join(lines))
        found = Journal(tmp_path / "new", head)
        found.close()
        assert found.entries == [entry]
    path.write_bytes(second)
    found = Journal(tmp_path / "new", head)
    found.close()
    assert found.entries == []


def test_concurrent_runs_are_refused(stopped, tmp_path):
    source, target = stopped
    folder = tmp_path / "packed.partial"
    other = Journal(folder, json.loads((folder / NAME).read_text().splitlines()[0].rpartition(" ")[0]))
    for force in (False, True):
        with pytest.raises(FormatError, match="is being written by another process"):
            packed(source, target, **OPTIONS, force=force)
    other.close()
    packed(source, target, **OPTIONS)


@contextmanager
def limit_file_size(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_system_errors_become_one_sentence(stopped, tmp_path):
    """Errors of the system while experts and while other weights are written."""
    source, target = stopped
    with limit_file_size(50_000):
        with pytest.raises(FormatError, match="packed cannot be written: File too large"):
            packed(source, target, **OPTIONS)
        with pytest.raises(FormatError, match=r"other cannot be written: .*File too large"):
            packed(source, tmp_path / "other", **OPTIONS)
    assert contents(packed(source, target, **OPTIONS)) == contents(packed(source, tmp_path / "other", **OPTIONS))


def test_disk_space_is_checked_first(tmp_path, monkeypatch):
    source = hf_folder(tmp_path / "hf")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(FormatError, match=r"needs 0\.00 GB more, and its disk has 0\.00 GB left\. Free some space"):
        packed(source, tmp_path / "packed", **OPTIONS)
    assert not list((tmp_path / "packed.partial").glob("experts/*"))


def test_existing_folder_is_replaced_only_with_force(tmp_path):
    source = hf_folder(tmp_path / "hf")
    target = packed(source, tmp_path / "packed", **OPTIONS)
    with pytest.raises(FormatError, match=r"packed already exists\. Use --force"):
        packed(source, target, **OPTIONS)
    packed(source, target, bits=8, group=32, force=True)
    assert experts_of(target).files[0].like["gate"].bits == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "packed"]
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters.txt").touch()
    with pytest.raises(FormatError, match="is not a model folder, so it is not replaced"):
        packed(source, tmp_path / "home", **OPTIONS, force=True)
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / "letters.txt").touch()
    with pytest.raises(FormatError, match=r"other\.partial exists, and was not left by an interrupted run"):
        packed(source, tmp_path / "other", **OPTIONS)


def test_force_does_not_touch_unrelated_folders(tmp_path):
    source = hf_folder(tmp_path / "hf")
    (tmp_path / "packed.partial").mkdir()
    (tmp_path / "packed.partial" / "letters.txt").touch()
    with pytest.raises(FormatError, match="was not left by an interrupted run"):
        packed(source, tmp_path / "packed", **OPTIONS, force=True)
    assert (tmp_path / "packed.partial" / "letters.txt").exists()
