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
    # latents of 128 heads: 496 bytes. Only GPUs before Hopper launch it; Hopper has `latent_rows`
    {"attend_pages", "SHAPE.group=128", "TILE.width=512"},
)
MAY_GATHER = (
    {"decode_columns", "S=8"},  # six shuffles by which a program finds its sequence, once, before it attends
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
    # the tests' other workers have the other cores
    processes = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    return compiled("--first", "--processes", str(processes))


def hold(mine: list[dict]) -> None:
    assert not [f"{report['name']}: {report['error']}" for report in mine if report["error"]]
    hot = [report for report in mine if report["hot"]]
    spilled = counted(hot, "spilled_nbytes", MAY_SPILL)
    assert not spilled, f"bytes that did not fit into registers: {spilled}"
    gathered = counted(hot, "gathered", MAY_GATHER)
    assert not gathered, f"lanes that the compiler believes to have parted: {gathered}"


def counted(reports: list[dict], what: str, excused: tuple[set[str], ...]) -> dict[str, int]:
    """How many there are in each build that has any, and is not excused by words of its name."""
    found = {report["name"]: report[what] for report in reports if report[what]}
    return {name: count for name, count in found.items() if not any(words <= set(name.split()) for words in excused)}


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile_without_spills(family: str, reports: list[dict], record_property):
    """The first build of each kernel keeps to registers, hot or not; one that takes more tuples compiles."""
    all_of_family = [report for report in reports if report["family"] == family]
    assert all_of_family, f"no case of {family} launches a kernel"
    firsts = {report["name"].split()[0]: report["name"] for report in reversed(all_of_family)}
    mine = [{**report, "hot": report["name"] in firsts.values()} for report in all_of_family]
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


def test_only_builds_that_are_named_are_excused():
    report = {"name": "decode_columns *i32 S=8 N=8", "hot": True, "error": None, "spilled_nbytes": 0, "gathered": 6}
    hold([report])
    for worse in ({"name": "decode_columns *i32 S=16 N=8"}, {"spilled_nbytes": 8}):
        with pytest.raises(AssertionError, match=r"bytes that did not fit|believes to have parted"):
            hold([{**report, **worse}])
