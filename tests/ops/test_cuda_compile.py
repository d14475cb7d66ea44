"""Every CUDA kernel compiles for Hopper, which needs no GPU, and the hot ones keep to registers."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from auraflux.ops._dispatch import families

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
FAMILIES = families()


def compiled(*options: str) -> list[dict]:
    # in a process of its own: here the kernels are imported for the interpreter
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "auraflux.ops.hopper.compile", "--json", *options]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def reports() -> list[dict]:
    return compiled("--first")


def hold(mine: list[dict]) -> None:
    assert not [f"{report['name']}: {report['error']}" for report in mine if report["error"]]
    spilled = {report["name"]: report["spilled_nbytes"] for report in mine if report["hot"] and report["spilled_nbytes"]}
    assert not spilled, f"bytes that did not fit into registers: {spilled}"
    gathered = {report["name"]: report["gathered"] for report in mine if report["hot"] and report["gathered"]}
    assert not gathered, f"lanes that the compiler believes to have parted: {gathered}"


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile_without_spills(family: str, reports: list[dict], record_property):
    mine = [report for report in reports if report["family"] == family]
    assert mine, f"{family}/cuda.py lists no KERNELS"
    for report in mine:
        record_property(report["name"], f"{report['registers']} registers, {report['shared_nbytes']} B shared")
        print(report)
    hold(mine)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_build_compiles_without_spills(family: str):
    hold(compiled(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_is_listed(family: str):
    listed = {build.kernel.__name__ for build in importlib.import_module(f"auraflux.ops.{family}.cuda").KERNELS}
    launched = set()
    for file in (ROOT / "auraflux" / "ops" / family).rglob("*.py"):
        launched |= _launched(file.read_text()) if file.parent.name == "cuda" or file.stem == "cuda" else set()
    assert launched <= listed, f"launched but not in KERNELS: {', '.join(sorted(launched - listed))}"


def test_every_kernel_that_families_share_is_listed_by_one():
    listed = {
        build.kernel.__name__ for family in FAMILIES for build in importlib.import_module(f"auraflux.ops.{family}.cuda").KERNELS
    }
    shared = (ROOT / "auraflux" / "ops" / "hopper").glob("*.py")
    launched = set().union(*(_launched(file.read_text()) for file in shared))
    assert launched
    assert launched <= listed, f"launched but not in KERNELS: {', '.join(sorted(launched - listed))}"


def _launched(text: str) -> set[str]:
    """Names that are launched in a source: name[grid](...)."""
    import ast

    return {
        node.func.value.id
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name)
    }
