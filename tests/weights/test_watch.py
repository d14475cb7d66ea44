"""Files that change under a running model: a sentence before the next step, and never a wrong text."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from auraflux.errors import FormatError
from auraflux.weights.watch import Watch
from tests.run.tiny import tiny

PROGRAM = """
import os, sys
from pathlib import Path
import auraflux

folder, harm = Path(sys.argv[1]), sys.argv[2]
model = auraflux.load(folder, device="cpu", context=64, kv="none")
write = lambda: list(model.tokens([5, 6, 7], max_tokens=6, temperature=0))
before, path = write(), folder / "model.safetensors"
if harm == "replaced":
    (folder / "other").write_bytes(bytes(path.stat().st_size))
    os.replace(folder / "other", path)
elif harm == "cut":
    os.truncate(path, 4096)
elif harm == "overwritten":
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(bytes(path.stat().st_size - 4096))
text = model.tokens([5, 6, 7, 8], max_tokens=6, temperature=0) if harm == "cut while writing" else None
if text is not None:
    next(text)
    os.truncate(path, 4096)
try:
    print("same" if (write() if text is None else list(text)) == before else "other")
except auraflux.AurafluxError as err:
    print(type(err).__name__, err)
"""


LONG = [pytest.param(harm, marks=pytest.mark.slow) for harm in ("replaced", "cut", "overwritten")]


@pytest.mark.parametrize("harm", [*LONG, "cut while writing"])
def test_a_changed_file_ends_in_a_sentence(harm: str, tmp_path: Path):
    folder = shutil.copytree(tiny(), tmp_path / "model")
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", PROGRAM, str(folder), harm]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wanted = f"FormatError {folder / 'model.safetensors'} was changed while the model was in use; load it again."
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ("same" if harm == "replaced" else wanted)


def test_what_is_not_mapped_may_change(tmp_path: Path):
    path = tmp_path / "weights"
    path.write_bytes(b"abc")
    watch = Watch([path])
    watch.check()
    path.write_bytes(b"abcd")
    watch.check()
    watch.check()


def test_what_is_gone_is_one_sentence(tmp_path: Path):
    with pytest.raises(FormatError, match="cannot be read: No such file"):
        Watch([tmp_path / "missing"])


def test_files_are_closed_quietly_at_the_end_of_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "weights"
    path.write_bytes(b"1234")
    watch = Watch([path])
    (number,) = watch._files
    # so the interpreter leaves modules when it ends
    monkeypatch.setattr("auraflux.weights.watch.os", None)
    del watch
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
