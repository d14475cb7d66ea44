"""`auraflux doctor`: its findings, and its advice for missing packages."""

import json

from click.testing import CliRunner

from auraflux import machine
from auraflux.cli import main


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


def test_the_table_shows_the_state_of_each_line():
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 0
    assert "✓  torch" in done.stdout


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
