"""Builds the wheels as `make wheel` does, for one processor level."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from auraflux.ops.simd.compile.levels import LEVELS, level_for
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.processor import cpu_features, machine

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy, so that nothing is left in the repository."""
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


def build_kernels(folder: Path) -> Path:
    """Build auraflux-kernels-cpu for this processor."""
    level = level_for(LEVELS.get(machine(), ()), ISA.name, cpu_features())
    if level is None:
        pytest.skip("there is no level for this processor")
    subprocess.run([sys.executable, "-m", "wheels.build", folder, "--levels", level.name], check=True, cwd=ROOT)
    [made] = folder.iterdir()
    return made
