"""The wheel works without the repository: built from a copy, installed into an empty folder, run outside of the repository."""

import os
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

import auraflux

ROOT = Path(__file__).parents[1]
DATA = ("py.typed", "serve/page/static/*", "eval/texts/*", "eval/questions/*", "*.json")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
# files of modules named auraflux that a process has imported
LOADED = """
import sys, auraflux, auraflux.cli, auraflux.ops, auraflux.loading.load, auraflux.serve.app
files = {getattr(module, "__file__", None) for name, module in sys.modules.items() if name.partition(".")[0] == "auraflux"}
print("\\n".join(sorted(filter(None, files))))
"""


def package_files() -> list[str]:
    """List the files that the wheel must contain, relative to the repository."""
    found = [path.relative_to(ROOT / "auraflux").as_posix() for path in (ROOT / "auraflux").rglob("*") if path.is_file()]
    wanted = [name for name in found if name.endswith(".py") or any(fnmatch(name, pattern) for pattern in DATA)]
    return sorted(f"auraflux/{name}" for name in wanted if "__pycache__" not in name)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, so that nothing is left in the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "auraflux", folder / "source" / "auraflux", ignore=shutil.ignore_patterns("__pycache__"))
    # folders that must stay out of the wheel
    for name in ("tests", "bench", "examples"):
        (folder / "source" / name).mkdir()
        (folder / "source" / name / "__init__.py").touch()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source" / name)
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder / "dist", folder / "source"]
    subprocess.run([*PIP, *build], check=True, capture_output=True, cwd=folder)
    [made] = (folder / "dist").iterdir()
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install it into an empty folder; its dependencies come from this environment."""
    folder = tmp_path_factory.mktemp("installed") / "site"
    subprocess.run(
        [*PIP, "install", "--no-deps", "--no-compile", "--no-index", "--target", folder, wheel], check=True, capture_output=True
    )
    return folder


def run(installed: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command outside of the repository with the installed package first on the path."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    return subprocess.run(args, capture_output=True, text=True, check=False, cwd=installed.parent, env=environment)


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


def test_installed_package_does_not_import_from_the_repository(installed: Path):
    files = run(installed, sys.executable, "-c", LOADED).stdout.splitlines()
    assert len(files) > 100
    assert [file for file in files if not Path(file).is_relative_to(installed)] == []


def test_shapes_and_evaluation_texts_are_installed(installed: Path):
    # each error is raised after the files were read
    shapes = run(installed, sys.executable, "-m", "auraflux", "bench", "model", "--random", "--shape", "nothing")
    assert "there is no shape 'nothing'. Those there are: " in shapes.stderr
    code = "from auraflux.eval.text import read_files; print(len(read_files([])))"
    assert int(run(installed, sys.executable, "-c", code).stdout) > 1
