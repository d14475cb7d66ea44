"""Every launched CUDA kernel compiles, without a GPU; on Hopper kernels on the critical path do not spill registers."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from auraflux.bench.shapes import MAIN_SHAPES
from auraflux.ops._dispatch import families

pytest.importorskip("triton")
ROOT = Path(__file__).parents[3]
OPS = ROOT / "auraflux" / "ops"
# all others are served by their references
FAMILIES = [name for name in families() if (OPS / name / "cuda").is_dir() or (OPS / name / "cuda.py").is_file()]
MAY_SPILL = (
    {"prefill_tiles", "SHAPE.width=256"},  # addresses of its rows are in memory during attention
    {"rank_kernel", "BE=256"},  # 72 bytes
    {"latent_code_rows", "CONFIG.full.recent_window=32"},  # 16 bytes, with which it is as fast as measured
    # latents of 128 heads: 496 bytes. Only GPUs before Hopper launch it; Hopper has `latent_rows`
    {"attend_pages", "SHAPE.group=128", "TILE.width=512"},
    # 72 bytes on an A100; pages on Hopper are arranged in pairs
    {"dequantize_pages", "CONFIG.shape.pairs=False"},
    # prompts in float32, of no model: 376 and 760 bytes. Other kernels serve bf16 with heads of 128
    {"scan_kernel", "DOT=fp32"},
    {"chunk_kernel", "DOT=fp32"},
    # 8 to 40 bytes: with 80 registers three programs fit a multiprocessor. Only GPUs before Hopper launch it
    {"slots_at_once"},
    # 8 bytes of addresses; only GPUs before Hopper launch it
    {"expert_blocks"},
    # 24 to 40 bytes of codes loaded ahead; only GPUs before Hopper launch it
    {"latent_codes_mma"},
)
MAY_DIVERGE = (
    {"decode_columns", "SHAPE.sequences=8"},  # six shuffles by which a program finds its sequence, once, before it attends
)


def run(module: str, *options: str) -> list[dict]:
    # in a subprocess: this process has imported the kernels for the interpreter
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, "--json", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def compiled(*options: str) -> list[dict]:
    return run("auraflux.ops.gpu.compile", *options)


@pytest.fixture(scope="module")
def reports() -> list[dict]:
    # the tests' other workers have the other cores
    processes = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    return compiled("--first", "--processes", str(processes))


def hold(mine: list[dict]) -> None:
    assert not [f"{report['name']}: {report['error']}" for report in mine if report["error"]]
    critical = [report for report in mine if report["critical"]]
    spilled = counted(critical, "spilled_nbytes", MAY_SPILL)
    assert not spilled, f"bytes that did not fit into registers: {spilled}"
    diverging = counted(critical, "convergence_barriers", MAY_DIVERGE)
    assert not diverging, f"lanes that the compiler believes to have diverged: {diverging}"


def counted(reports: list[dict], what: str, excused: tuple[set[str], ...]) -> dict[str, int]:
    """Return the count of each variant that has any and is not excused by words of its name."""
    found = {report["name"]: report[what] for report in reports if report[what]}
    return {name: count for name, count in found.items() if not any(words <= set(name.split()) for words in excused)}


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile_without_spills(family: str, reports: list[dict], record_property):
    """The first variant of each kernel does not spill, critical or not; one that takes more tuples compiles."""
    all_of_family = [report for report in reports if report["family"] == family]
    assert all_of_family, f"no case of {family} launches a kernel"
    firsts = {report["name"].split()[0]: report["name"] for report in reversed(all_of_family)}
    mine = [{**report, "critical": report["name"] in firsts.values()} for report in all_of_family]
    for report in mine:
        record_property(report["name"], f"{report['registers']} registers, {report['shared_nbytes']} B shared")
        print(report)
    hold(mine)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_variant_compiles_without_spills(family: str):
    hold(compiled(family))


@pytest.mark.slow
@pytest.mark.parametrize("shape", MAIN_SHAPES)
def test_kernels_of_models_compile_without_spills(shape: str):
    hold(run("auraflux.bench.gpu.steps", shape))


# from instructions of Hopper to those of Ampere: copies, launches, packed numbers, shared memory
PORTED = {"turboquant": ("attend_pairs", "append_many"), "moe": ("up_slots", "down_slots", "up_stream", "down_stream")}


@pytest.mark.parametrize("family", ["turboquant", pytest.param("moe", marks=pytest.mark.slow)])
def test_ported_kernels_compile_for_ampere(family: str):
    kernels = [option for name in PORTED[family] for option in ("--kernel", name)]
    reports = compiled(family, "--first", "--gpu", "8.6", "--processes", "1", *kernels)
    assert {report["name"].split()[0] for report in reports} == set(PORTED[family])
    assert not [f"{report['name']}: {report['error']}" for report in reports if report["error"]]


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["8.0", "8.6", "8.9", "10.0", "12.0"])
def test_kernels_compile_for_other_gpus(gpu: str):
    """They have no instruction that the GPU lacks, and fit into its shared memory."""
    reports = compiled("--first", "--gpu", gpu)
    assert {report["family"] for report in reports} >= {"linear", "moe", "attention", "turboquant", "delta"}
    assert not [f"{report['name']}: {report['error']}" for report in reports if report["error"]]


# kernels that need a request, inside which tests of their own launch them
ON_REQUEST = {"linear": {"round_int4", "round_rows"}}  # `fp8_products`: tests/ops/linear/test_fp8.py


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_is_launched_by_a_case(family: str, reports: list[dict]):
    known = {report["name"].split()[0] for report in reports if report["family"] == family}
    sources = [path for path in (OPS / family).rglob("*.py") if "cuda" in (*path.relative_to(OPS).parts[:-1], path.stem)]
    named = {name for path in sources for name in launched_names(path.read_text())}
    assert named, f"{family} launches nothing"
    known |= ON_REQUEST.get(family, set())
    assert named <= known, f"launched by no case: {', '.join(sorted(named - known))}"


def launched_names(text: str) -> set[str]:
    """Return the kernels in a source's `launch(kernel, grid)`.

    No kernel is launched in Triton's own way, which this would miss.
    """
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


def test_only_named_variants_are_excused():
    report = {
        "name": "decode_columns *i32 SHAPE.sequences=8 SHAPE.columns=8",
        "critical": True,
        "error": None,
        "spilled_nbytes": 0,
        "convergence_barriers": 6,
    }
    hold([report])
    for worse in ({"name": "decode_columns *i32 SHAPE.sequences=16 SHAPE.columns=8"}, {"spilled_nbytes": 8}):
        with pytest.raises(AssertionError, match=r"bytes that did not fit|believes to have diverged"):
            hold([{**report, **worse}])
