"""`auraflux doctor`: its findings, and its advice for missing packages."""

import json
from importlib import import_module
from types import SimpleNamespace

import torch
from click.testing import CliRunner

from auraflux import machine
from auraflux.bench.gpu.run import gpu_cases
from auraflux.bench.ops import bench_cases
from auraflux.cli import main
from auraflux.cli.doctor import _gpu
from auraflux.cli.output import machine_report
from auraflux.cli.output.machine_report import CPU_CASES, GPU_CASES, named
from auraflux.ops.simd.threads import thread_pool


def diagnose(*words: str) -> dict[str, dict[str, dict]]:
    done = CliRunner().invoke(main, ["doctor", "--json", *words])
    assert done.exit_code == 0, done.stderr
    return {title: {one["name"]: one for one in findings} for title, findings in json.loads(done.stdout).items()}


def test_json_holds_every_section():
    found = diagnose()
    assert list(found) == ["machine", "packages", "kernels", "gpu", "optional"]
    assert int(found["machine"]["cores"]["value"]) >= 1
    assert found["packages"]["torch"]["state"] == "ok"
    assert {"cpu features", "instructions", "threads", "prebuilt kernels", "compiled kernels"} == set(found["kernels"])


def test_the_kernels_of_a_gpu_are_looked_for(monkeypatch):
    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=2**37, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: gpu)
    found = {one.name: one for one in _gpu()}
    assert found["gpu 0"].value == "NVIDIA H200, 128 GiB, compute capability 9.0"
    assert found["prebuilt kernels, sm_90"].state == "optional"


def test_the_table_shows_the_state_of_each_line():
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 0
    assert "✓  torch" in done.stdout


def test_looking_compiles_nothing(monkeypatch):
    """A cache that it filled would keep the next command from saying that it compiles."""

    def start(count: int) -> int:
        raise AssertionError("the worker threads start, which compiles their loop")

    monkeypatch.setattr(thread_pool, "count", 0)
    monkeypatch.setattr(thread_pool, "start", start)
    assert int(diagnose()["kernels"]["threads"]["value"]) >= 1


def test_a_missing_optional_package_comes_with_its_command(monkeypatch):
    monkeypatch.setattr(
        machine, "versions", lambda *names: dict.fromkeys(names, "1.0") | ({"mlx": None} if "mlx" in names else {})
    )
    mlx = diagnose()["optional"]["mlx"]
    assert (mlx["state"], mlx["advice"]) == ("optional", "for a peer in `auraflux bench`: pip install 'mlx[cpu]'")


def test_a_missing_required_package_fails(monkeypatch):
    monkeypatch.setattr(
        machine, "versions", lambda *names: dict.fromkeys(names, "1.0") | ({"gguf": None} if "gguf" in names else {})
    )
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 1
    assert "pip install gguf" in done.stdout
    assert done.stderr == "error: required packages are not installed: gguf. Run pip install gguf.\n"


def test_a_cache_that_cannot_be_written_comes_with_advice(monkeypatch):
    monkeypatch.setattr("auraflux.ops.simd.compile.cache_folder.CACHE_FOLDER", "")
    found = diagnose()["kernels"]["compiled kernels"]
    assert found["state"] == "missing"
    assert "AURAFLUX_CACHE" in found["advice"]


def test_the_cases_of_a_report_exist(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert len(named(bench_cases(), CPU_CASES)) == len(CPU_CASES)
    assert len(named(gpu_cases(), GPU_CASES)) == len(GPU_CASES)


def test_a_report_holds_the_machine_and_checked_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_report, "CPU_CASES", (("rms_norm", "one-row"),))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = CliRunner().invoke(main, ["doctor", "--report", str(tmp_path / "report.json")])
    assert done.exit_code == 0, done.stderr
    assert "cpu: 1 of 1 kernels are right and were timed, 0 are wrong" in done.stdout
    assert "gpu: not found by torch" in done.stdout
    found = json.loads((tmp_path / "report.json").read_text())
    assert list(found) == ["doctor", "cpu", "gpu"]
    assert found["cpu"]["results"][0]["op"] == "rms_norm"
    assert found["gpu"] is None


def test_a_gpu_that_fails_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_report, "CPU_CASES", ())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)

    def fail(*args: object) -> None:
        raise RuntimeError("PTXAS error")

    monkeypatch.setattr(import_module("auraflux.cli.bench.gpu"), "run_cases", fail)
    done = CliRunner().invoke(main, ["doctor", "--report", str(tmp_path / "report.json")])
    assert "gpu: RuntimeError: PTXAS error" in done.stdout
    assert json.loads((tmp_path / "report.json").read_text())["gpu"] == {"error": "RuntimeError: PTXAS error"}


def test_a_report_needs_a_folder(tmp_path):
    done = CliRunner().invoke(main, ["doctor", "--report", str(tmp_path / "missing" / "report.json")])
    assert done.exit_code == 1
    assert "there is no folder" in done.stderr
