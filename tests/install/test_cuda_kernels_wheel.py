"""auraflux-kernels-cuda is built without a GPU: what a server's start launches is found and packed."""

import csv
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import auraflux
from tests.install.wheels import ROOT
from tests.ops.gpu.test_capture import output_of

pytest.importorskip("triton")
# what a start launches is what Triton would be asked for, by the same names
STARTS = """
import json
from auraflux.bench.gpu.steps import step_builds
from wheels.fake_cuda import start_variants

found = {}
for gpu in ((9, 0), (8, 9)):
    variants = start_variants("llama-8b", gpu, sequences=4)
    found[f"{gpu[0]}.{gpu[1]}"] = [[each.kernel.rpartition(":")[2], list(each.capability)] for each in variants]
names = {each.name for each in start_variants("llama-8b", (9, 0), sequences=8)}
found["of steps"] = [each.name in names for each in step_builds("llama-8b") if each.kernel.endswith(":matvec")]
print(json.dumps(found))
"""


def test_a_start_launches_kernels_of_calibration_prefill_and_decode():
    found = output_of(STARTS)
    for gpu in ("9.0", "8.9"):
        names = {name for name, _ in found[gpu]}
        assert {"calibrate_keys", "merge", "_rms"} <= names, names
        assert all(f"{major}.{minor}" == gpu for _, (major, minor) in found[gpu])
    assert found["of steps"]
    assert all(found["of steps"])


def test_the_wheel_has_entries_with_metadata_and_a_record(tmp_path: Path):
    from wheels.archive import files_of, write_wheel
    from wheels.build_cuda import ABOUT

    made = tmp_path / "made" / "sm_90-0123"
    made.mkdir(parents=True)
    (made / "norm.ab.json").write_text(json.dumps({"code_sha256": "00"}))
    (made / "norm.ab.cubin").write_bytes(b"code")
    (made / "notes.txt").write_text("no kernel")
    wheels = [write_wheel(ABOUT, files_of(made.parent, "*.json", "*.cubin"), tmp_path / name) for name in ("a", "b")]
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    assert wheels[0].name == f"auraflux_kernels_cuda-{auraflux.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheels[0]) as archive:
        names, folder = archive.namelist(), f"auraflux_kernels_cuda-{auraflux.__version__}.dist-info"
        assert "auraflux_kernels_cuda/sm_90-0123/norm.ab.cubin" in names
        assert not [name for name in names if name.endswith(".txt")]
        about = archive.read(f"{folder}/METADATA").decode()
        assert f"Requires-Dist: auraflux=={auraflux.__version__}" in about
        assert "Requires-Dist: triton==3.6" in about
        assert sorted(row[0] for row in csv.reader(archive.read(f"{folder}/RECORD").decode().splitlines())) == sorted(names)


@pytest.mark.parametrize("argument", ["--gpus=7.5", "--shapes=no-such-model"])
def test_an_unknown_gpu_or_shape_is_refused(tmp_path: Path, argument: str):
    command = [sys.executable, "-m", "wheels.build_cuda", str(tmp_path), argument]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert argument.partition("=")[2] in done.stderr
    assert "9.0" in done.stderr
