"""Output folders: existing data is never lost, one concurrent run wins, and leftovers of killed runs are removed."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from auraflux.errors import FormatError
from auraflux.models import family
from auraflux.weights.convert.destination import LOCK_FILE, put_in_place, working_folder
from auraflux.weights.convert.mlx_folder import convert
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.engine.tiny import tiny
from tests.weights.experts.packed_folders import hf_folder, packed


def written(target: Path, **options) -> Path:
    checkpoint = open_checkpoint(tiny())
    return convert(checkpoint, family(checkpoint.config), target, **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def appear(target: Path) -> None:
    target.mkdir()
    (target / "letters.txt").write_text("dear")


def test_target_created_meanwhile_is_not_replaced(tmp_path: Path):
    target = tmp_path / "mlx"
    with pytest.raises(FormatError, match=r"mlx already exists\. Use --force"):
        written(target, add=lambda folder: appear(target))
    assert names(tmp_path) == ["mlx"]
    assert names(target) == ["letters.txt"]
    # --force does not replace it either, since it is not a model
    shutil.rmtree(target)
    with pytest.raises(FormatError, match="is not a model folder, so it is not replaced"):
        written(target, force=True, add=lambda folder: appear(target))
    assert names(target) == ["letters.txt"]


def test_pack_resumes_when_the_conflicting_target_is_gone(tmp_path: Path):
    source, target = hf_folder(tmp_path / "hf"), tmp_path / "packed"
    with pytest.raises(FormatError, match=r"packed already exists\. Use --force"):
        packed(source, target, bits=4, group=32, add=lambda folder: appear(target))
    assert names(target) == ["letters.txt"]
    target.rename(tmp_path / "letters")
    packed(source, target, bits=4, group=32)
    assert names(tmp_path) == ["hf", "letters", "packed"]


def test_dangling_link_is_not_overwritten(tmp_path: Path):
    (tmp_path / "mlx").symlink_to("nowhere")
    with pytest.raises(FormatError, match="already exists"):
        written(tmp_path / "mlx")
    assert os.path.lexists(tmp_path / "mlx")


def test_concurrent_run_raises(tmp_path: Path):
    target, said = tmp_path / "mlx", []

    def meanwhile(folder: Path) -> None:
        for force in (False, True):
            with pytest.raises(FormatError, match=r"\.mlx\.unfinished is being written by another process") as caught:
                written(target, force=force)
            said.append(str(caught.value))

    written(target, add=meanwhile)
    assert len(said) == 2
    assert names(tmp_path) == ["mlx"]


PROGRAM = """
import os, signal, sys
from pathlib import Path
from auraflux.weights.convert import destination
from auraflux.weights.convert.destination import put_in_place, working_folder
target = Path(sys.argv[1])
rename, left = os.rename, int(sys.argv[2])
def counted(*names):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(*names)
destination.os.rename = counted
if sys.argv[3] == "one by one":
    destination._exchange = lambda new, target: False
with working_folder(target) as aside:
    (aside / "new").mkdir()
    (aside / "new" / "which").write_text("new")
    put_in_place(aside / "new", target, aside, lambda: None)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("renames", "how", "which"),
    [(0, "one by one", "old"), (1, "one by one", "old"), (2, "one by one", "new"), (0, "at once", "new")],
)
def test_killed_run_is_repaired(tmp_path: Path, renames: int, how: str, which: str):
    target = tmp_path / "mlx"
    target.mkdir()
    (target / "which").write_text("old")
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(target), str(renames), how], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / ".mlx.unfinished" / LOCK_FILE).exists()
    with working_folder(target) as aside:
        assert names(aside) == [LOCK_FILE]
        assert (target / "which").read_text() == which
    assert names(tmp_path) == ["mlx"]


def test_next_run_removes_leftovers(tmp_path: Path):
    left = tmp_path / ".mlx.unfinished"
    (left / "new").mkdir(parents=True)
    (left / "new" / "part-0").write_text("half")
    (left / LOCK_FILE).touch()
    written(tmp_path / "mlx")
    assert names(tmp_path) == ["mlx"]


def test_unrelated_folder_is_not_touched(tmp_path: Path):
    (tmp_path / ".mlx.unfinished").mkdir()
    (tmp_path / ".mlx.unfinished" / "letters.txt").touch()
    with pytest.raises(FormatError, match="was not left by an interrupted run"):
        written(tmp_path / "mlx")
    assert names(tmp_path / ".mlx.unfinished") == ["letters.txt"]


def test_failed_rename_restores_the_target(tmp_path: Path):
    target = tmp_path / "mlx"
    appear(target)
    with working_folder(target) as aside, pytest.raises(FileNotFoundError):
        put_in_place(aside / "new", target, aside, lambda: None)
    assert names(target) == ["letters.txt"]


def test_links_outside_the_model_are_not_copied(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("{}")
    source = tmp_path / "source"
    shutil.copytree(tiny(), source)
    (source / "extra.json").symlink_to(secret)
    checkpoint = open_checkpoint(source)
    with pytest.raises(FormatError, match=r"extra\.json is a link to .*secret, which lies outside"):
        convert(checkpoint, family(checkpoint.config), tmp_path / "mlx")
    assert names(tmp_path) == ["secret", "source"]


def test_too_long_name_raises(tmp_path: Path):
    with pytest.raises(FormatError, match="cannot be written: File name too long"):
        written(tmp_path / ("x" * 300))
