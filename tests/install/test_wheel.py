"""The wheels work without the repository: built from a copy, installed into an empty folder, run outside of the repository."""

import json
import os
import subprocess
import sys
import urllib.request
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

import auraflux
from auraflux.weights.download.pull import locate, models_folder
from tests.install.wheels import PIP, ROOT

DATA = ("py.typed", "serve/page/static/*", "eval/texts/*", "eval/questions/*", "*.json")
# files of modules named auraflux that a process has imported, and what it reads from data files
LOADED = """
import json, sys, auraflux, auraflux.cli, auraflux.ops, auraflux.loading.load, auraflux.serve.app
from auraflux.bench.shapes import shape_of
from auraflux.eval.text import read_files
files = {getattr(module, "__file__", None) for name, module in sys.modules.items() if name.partition(".")[0] == "auraflux"}
layers = shape_of("llama-8b")["num_hidden_layers"]
print(json.dumps({"files": sorted(filter(None, files)), "texts": len(read_files([])), "layers": layers}))
"""


def package_files() -> list[str]:
    """List the files that the wheel must contain, relative to the repository."""
    found = [path.relative_to(ROOT / "auraflux").as_posix() for path in (ROOT / "auraflux").rglob("*") if path.is_file()]
    wanted = [name for name in found if name.endswith(".py") or any(fnmatch(name, pattern) for pattern in DATA)]
    return sorted(f"auraflux/{name}" for name in wanted if "__pycache__" not in name)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install it into an empty folder; its dependencies come from this environment."""
    folder = tmp_path_factory.mktemp("installed") / "site"
    subprocess.run(
        [*PIP, "install", "--no-deps", "--no-compile", "--no-index", "--target", folder, wheel], check=True, capture_output=True
    )
    return folder


def environment(installed: Path) -> dict[str, str]:
    """Return an environment with the installed package first on the path."""
    return {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}


def run(installed: Path, *args: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command outside of the repository."""
    options = {"capture_output": True, "text": True, "cwd": installed.parent, "env": environment(installed)}
    return subprocess.run(args, input=stdin, check=False, **options)


def test_wheel_contains_only_the_package(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"auraflux", f"auraflux-{auraflux.__version__}.dist-info"}
    assert sorted(set(package_files()) - set(names)) == []
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_wheel_metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        about = archive.read(f"auraflux-{auraflux.__version__}.dist-info/METADATA").decode()
    for line in (f"Version: {auraflux.__version__}", "Author: auraflux contributors", "License-Expression: Apache-2.0"):
        assert line in about
    for label in ("Homepage", "Documentation", "Source", "Changelog", "Issues"):
        assert f"Project-URL: {label}, https://" in about
    assert "Classifier: Typing :: Typed" in about


def test_installed_command_runs_outside_the_repository(installed: Path):
    command = installed / "bin" / "auraflux"
    assert run(installed, command, "--version").stdout == f"auraflux {auraflux.__version__}\n"
    listed = run(installed, command, "ops", "--json")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert '"op": "rms_norm"' in listed.stdout


def test_installed_package_uses_its_own_modules_shapes_and_texts(installed: Path):
    done = run(installed, sys.executable, "-c", LOADED)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["files"]) > 100
    assert [file for file in found["files"] if not Path(file).is_relative_to(installed)] == []
    assert found["texts"] > 1
    assert found["layers"] == 32


@pytest.fixture
def with_kernels(wheel: Path, kernels_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Install both wheels; return their folder and that of the JIT cache, which is empty."""
    locate()
    monkeypatch.setenv("AURAFLUX_HOME", str(models_folder().parent))
    monkeypatch.setenv("AURAFLUX_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "site"
    install = ["install", "--no-deps", "--no-index", "--target", folder, wheel, kernels_wheel]
    subprocess.run([*PIP, *install], check=True, capture_output=True)
    return folder, tmp_path / "cache"


def compiled_in(cache: Path) -> list[str]:
    """List the kernels that were compiled."""
    return [path.name for path in cache.rglob("*.nbc")]


@pytest.mark.slow
def test_first_commands_compile_nothing(with_kernels: tuple[Path, Path]):
    site, cache = with_kernels
    command = site / "bin" / "auraflux"
    first = {"--version": auraflux.__version__, "--help": "generate", "doctor": "prebuilt kernels", "inspect": "llama"}
    for words, wanted in first.items():
        done = run(site, command, words)
        assert (done.returncode, wanted in done.stdout) == (0, True), done.stdout + done.stderr
    done = run(site, command, "generate", "-p", "The capital of France is", "-n", "8", "-t", "0")
    assert "Paris" in done.stdout
    assert "compiled" not in done.stderr
    for kv in ("k8v4", "k8v8", "none"):
        assert (
            "Paris" in run(site, command, "generate", "-p", "The capital of France is", "-n", "8", "-t", "0", "--kv", kv).stdout
        )
    done = run(site, command, "chat", "-n", "16", "-t", "0", stdin="Name the capital of France.\n")
    assert "Paris" in done.stdout
    assert _answer_of_server(site, command) != ""
    assert compiled_in(cache) == []


def _answer_of_server(site: Path, command: Path) -> str:
    """Start a server, send one request and return the answer."""
    words = [command, "serve", "--port", "0", "--context", "512"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=site.parent, env=environment(site)) as server:
        assert server.stderr is not None
        try:
            address = next(line.split("listening on ")[1].split()[0] for line in server.stderr if "listening on " in line)
            assert any("ready: " in line for line in server.stderr)
            body = {"messages": [{"role": "user", "content": "Name the capital of France."}], "max_tokens": 16}
            asked = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode())
            asked.add_header("Content-Type", "application/json")
            with urllib.request.urlopen(asked) as response:
                return json.load(response)["choices"][0]["message"]["content"]
        finally:
            server.terminate()


@pytest.mark.slow
def test_kernels_of_other_sources_are_not_loaded(with_kernels: tuple[Path, Path]):
    site, _ = with_kernels
    changed = site / "auraflux" / "ops" / "norm" / "cpu.py"
    changed.write_text(changed.read_text() + "\n")
    code = "from auraflux.ops.simd.compile.cache_folder import PREBUILT; print(PREBUILT)"
    assert run(site, sys.executable, "-c", code).stdout == "None\n"


@pytest.mark.slow
def test_kernels_wheel_names_the_versions_it_is_for(kernels_wheel: Path):
    import numba

    with zipfile.ZipFile(kernels_wheel) as archive:
        assert archive.testzip() is None
        [about] = [archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA")]
    for line in (f"Requires-Dist: auraflux=={auraflux.__version__}", f"Requires-Dist: numba=={numba.__version__}"):
        assert line in about
    assert kernels_wheel.stat().st_size < 60 << 20
