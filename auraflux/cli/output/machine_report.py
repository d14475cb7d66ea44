"""`auraflux doctor --report`: a short benchmark of a machine, in a file that users attach to an issue."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auraflux.errors import AurafluxError

if TYPE_CHECKING:
    from auraflux.ops._cases import Case

SECONDS = 0.2  # for each case
CPU_CASES = (
    ("linear", "4bit-1"),
    ("linear", "4bit-64"),
    ("linear", "format-q4k"),
    ("expert_mlp", "one-token"),
    ("expert_mlp", "64-tokens"),
    ("turboquant_attention", "fast-decode-8k-k4v4"),
    ("rms_norm", "one-row"),
)
GPU_CASES = (
    ("linear", "4bit-8192x8192-1"),
    ("linear", "4bit-8192x8192-8"),
    ("linear", "4bit-8192x8192-64"),
    ("linear", "4bit-8192x8192-2048"),
    ("mixture", "one-token"),
    ("mixture", "64-tokens"),
    ("expert_mlp", "4096-tokens"),
    ("turboquant_attention", "k4v4-32k"),
    ("turboquant_attention", "k4v4-full-precision-32k"),
    ("gated_delta_step", "batch-1"),
    ("attention", "prefill-2k"),
)


def named(cases: "list[Case]", wanted: tuple[tuple[str, str], ...]) -> "list[Case]":
    """Return the wanted cases; KeyError if there is none of a name."""
    by_name = {(case.op.name, case.name): case for case in cases}
    return [by_name[name] for name in wanted]


def write_report(findings: dict[str, Any], target: Path) -> tuple[Path, dict[str, Any]]:
    """Check and time a few cases on each device, write everything to a file, and return both."""
    from auraflux.bench.report import place, save

    file = place(target, "auraflux-report")
    found = {"doctor": findings, "cpu": _cpu(), "gpu": _gpu()}
    save(found, file)
    return file, found


def _cpu() -> dict[str, Any]:
    from auraflux.bench.ops import bench_cases
    from auraflux.bench.report import document
    from auraflux.cli.bench import run_cases
    from auraflux.machine import load

    before = load()
    results, peak, threads = run_cases(named(bench_cases(), CPU_CASES), False, SECONDS)
    return document(shlex.join(["auraflux", *sys.argv[1:]]), "cpu", threads, before, peak, results)


def _gpu() -> dict[str, Any] | None:
    """Return the results of the GPU, or why there are none; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        from auraflux.bench.gpu.report import document, this_gpu
        from auraflux.bench.gpu.run import gpu_cases, no_peers
        from auraflux.cli.bench.gpu import run_cases

        results, peaks, stopped = run_cases(named(gpu_cases(), GPU_CASES), no_peers, SECONDS)
    except (AurafluxError, RuntimeError, ModuleNotFoundError) as err:
        # the report of a GPU that fails is the one that matters most
        return {"error": f"{type(err).__name__}: {err}"}
    found = document(shlex.join(["auraflux", *sys.argv[1:]]), this_gpu(), peaks, results)
    return found if stopped is None else found | {"error": str(stopped)}
