"""Model files that change while the model runs: an error before the next step, never wrong output."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from auraflux.errors import FormatError
from auraflux.weights.file_watch import FileWatch
from tests.engine.tiny import tiny

PROGRAM = """
import os, sys
from pathlib import Path
import auraflux

folder, harm = Path(sys.argv[1]), sys.argv[2]
model = auraflux.load(folder, device="cpu", context=64, kv="none")
generate = lambda: list(model.tokens([5, 6, 7], max_tokens=6, temperature=0))
before, path = generate(), folder / "model.safetensors"
if harm == "replaced":
    (folder / "other").write_bytes(bytes(path.stat().st_size))
    os.replace(folder / "other", path)
elif harm == "cut":
    os.truncate(path, 4096)
elif harm == "overwritten":
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(bytes(path.stat().st_size - 4096))
stream = model.tokens([5, 6, 7, 8], max_tokens=6, temperature=0) if harm == "cut while generating" else None
if stream is not None:
    next(stream)
    os.truncate(path, 4096)
try:
    print("same" if (generate() if stream is None else list(stream)) == before else "other")
except auraflux.AurafluxError as err:
    print(type(err).__name__, err)
"""


LONG = [pytest.param(harm, marks=pytest.mark.slow) for harm in ("replaced", "cut", "overwritten")]


@pytest.mark.parametrize("harm", [*LONG, "cut while generating"])
def test_changed_file_raises(harm: str, tmp_path: Path):
    folder = shutil.copytree(tiny(), tmp_path / "model")
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", PROGRAM, str(folder), harm]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wanted = f"FormatError {folder / 'model.safetensors'} was changed while the model was in use; load it again."
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ("same" if harm == "replaced" else wanted)


def test_unmapped_file_may_change(tmp_path: Path):
    path = tmp_path / "weights"
    path.write_bytes(b"abc")
    watch = FileWatch([path])
    watch.check()
    path.write_bytes(b"abcd")
    watch.check()
    watch.check()


def test_missing_file_raises(tmp_path: Path):
    with pytest.raises(FormatError, match="cannot be read: No such file"):
        FileWatch([tmp_path / "missing"])


def test_files_are_closed_at_interpreter_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "weights"
    path.write_bytes(b"1234")
    watch = FileWatch([path])
    (descriptor,) = watch._files
    # module globals are None during interpreter shutdown
    monkeypatch.setattr("auraflux.weights.file_watch.os", None)
    del watch
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
