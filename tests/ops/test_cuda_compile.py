"""Every CUDA kernel that is launched compiles for Hopper, which needs no GPU, and the hot ones keep to registers."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from auraflux.bench.shapes import SHAPES
from auraflux.ops._dispatch import families

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
OPS = ROOT / "auraflux" / "ops"
# all others are served by their references
FAMILIES = [name for name in families() if (OPS / name / "cuda").is_dir() or (OPS / name / "cuda.py").is_file()]
MAY_SPILL = (
    {"prefill_tiles", "D=256"},  # it keeps the places of its rows in memory while it attends
    {"rank_kernel", "BE=256"},  # 72 bytes
    {"latent_code_rows", "KEPT.newest=32"},  # 16 bytes, with which it is as fast as measured
)


def run(module: str, *options: str) -> list[dict]:
    # in a process of its own: here the kernels are imported for the interpreter
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, "--json", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def compiled(*options: str) -> list[dict]:
    return run("auraflux.ops.hopper.compile", *options)


@pytest.fixture(scope="module")
def reports() -> list[dict]:
    return compiled("--first")


def hold(mine: list[dict]) -> None:
    assert not [f"{report['name']}: {report['error']}" for report in mine if report["error"]]
    hot = [report for report in mine if report["hot"]]
    excused = [report for report in hot if any(words <= set(report["name"].split()) for words in MAY_SPILL)]
    spilled = {report["name"]: report["spilled_nbytes"] for report in hot if report["spilled_nbytes"] and report not in excused}
    assert not spilled, f"bytes that did not fit into registers: {spilled}"
    gathered = {report["name"]: report["gathered"] for report in hot if report["gathered"]}
    assert not gathered, f"lanes that the compiler believes to have parted: {gathered}"


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile_without_spills(family: str, reports: list[dict], record_property):
    """The first build of each kernel keeps to registers, hot or not."""
    mine = [{**report, "hot": True} for report in reports if report["family"] == family]
    assert mine, f"no case of {family} launches a kernel"
    for report in mine:
        record_property(report["name"], f"{report['registers']} registers, {report['shared_nbytes']} B shared")
        print(report)
    hold(mine)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_build_compiles_without_spills(family: str):
    hold(compiled(family))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_what_models_launch_compiles_without_spills(shape: str):
    hold(run("auraflux.bench.gpu.steps", shape))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_is_launched_by_a_case(family: str, reports: list[dict]):
    known = {report["name"].split()[0] for report in reports if report["family"] == family}
    sources = [path for path in (ROOT / "auraflux" / "ops" / family).rglob("*.py") if "cuda" in (path.parent.name, path.stem)]
    named = {name for path in sources for name in launched_names(path.read_text())}
    assert named, f"{family} launches nothing"
    assert named <= known, f"launched by no case: {', '.join(sorted(named - known))}"


def launched_names(text: str) -> set[str]:
    """The kernels in a source's `launch(kernel, grid)`; a launch in Triton's own way would not be seen, so there is none."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name):
            raise AssertionError(f"{ast.unparse(node.func)} is called: write launch(kernel, grid)(...)")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "launch":
            assert isinstance(node.args[0], ast.Name), f"{ast.unparse(node)} does not name its kernel"
            names.add(node.args[0].id)
    return names


def test_launches_are_found_in_sources():
    assert launched_names("launch(one, (3,))(x)\nif x:\n    launch(two, grid)(x, y)\nother(three)") == {"one", "two"}
    with pytest.raises(AssertionError, match="launch"):
        launched_names("one[(3,)](x)")
