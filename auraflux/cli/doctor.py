"""`auraflux doctor`: the machine, the installed packages, and the packages that are missing."""

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from auraflux.cli.options.command import Command
from auraflux.cli.options.early_checks import check_model
from auraflux.cli.output.failure import Failure

NEEDED = (
    "torch",
    "numpy",
    "numba",
    "llvmlite",
    "safetensors",
    "tokenizers",
    "jinja2",
    "huggingface_hub",
    "gguf",
    "click",
    "rich",
)
OPTIONAL = {
    "triton": "kernels on NVIDIA GPUs",
    "aiohttp": "the client of `auraflux bench serve`",
    "mlx": "a peer in `auraflux bench`",
    "onnx": "a peer in `auraflux bench`",
    "onnxruntime": "a peer in `auraflux bench`",
    "transformers": "a peer in `auraflux bench`",
}
PIP_NAMES = {"mlx": "'mlx[cpu]'"}
# features that kernels use or that identify the processor
FEATURES = {
    "x86_64": ("avx2", "fma", "f16c", "avxvnni", "avx512f", "avx512bw", "avx512vnni", "avx512bf16", "amx-int8"),
    "aarch64": ("neon", "dotprod", "fullfp16", "bf16", "i8mm", "sve", "sve2"),
}
PREBUILT_ADVICE = "kernels are compiled on first use; the wheel auraflux-kernels-cpu has most of them, see docs/install.md"
CUDA_ADVICE = "the first start compiles kernels; the wheel auraflux-kernels-cuda has many, see docs/install.md"
SYMBOLS = {"ok": "[green]✓[/green]", "missing": "[red]✗[/red]", "optional": "[yellow]-[/yellow]"}


@dataclass(frozen=True)
class Finding:
    """One line of output; the state is "ok", "missing" (required, or kernels are slow without it) or "optional"."""

    name: str
    state: str
    value: str
    advice: str | None = None


EXAMPLES = (
    "auraflux doctor",
    "auraflux doctor --compile model.gguf",
    "auraflux doctor --report report.json",
)


@click.command(cls=Command, examples=EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--compile", "compile_for", metavar="MODEL", help="Compile the CPU kernels of MODEL ahead of time.")
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also check and time a few kernels on each device, and write a JSON file to attach to an issue.",
)
def doctor(as_json: bool, compile_for: str | None, report: Path | None) -> None:
    """Show the machine, the packages, and which kernels will run.

    The exit code is 1 when a required package is not installed.
    """
    if compile_for is not None:
        _compile(compile_for)
        return
    sections: dict[str, Callable[[], Iterator[Finding]]] = {
        "machine": _machine,
        "packages": _packages,
        "kernels": _kernels,
        "gpu": _gpu,
        "optional": _optional,
    }
    found = {title: list(look()) for title, look in sections.items()}
    findings = {title: [asdict(one) for one in some] for title, some in found.items()}
    if report is not None:
        _report(findings, report)
    elif as_json:
        click.echo(json.dumps(findings, indent=2))
    else:
        _show(found)
    if absent := [one.name for one in found["packages"] if one.state == "missing"]:
        raise Failure(f"required packages are not installed: {', '.join(absent)}. Run pip install {' '.join(absent)}.")


def _report(findings: dict[str, Any], target: Path) -> None:
    """Write the report, and say what it found."""
    from auraflux.cli.output.machine_report import write_report

    file, found = write_report(findings, target)
    for device in ("cpu", "gpu"):
        each = found[device]
        if each is None:
            click.echo(f"{device}: not found by torch")
        elif "results" not in each:
            click.echo(f"{device}: {each['error']}")
        else:
            states = [result["state"] for result in each["results"]]
            right, wrong = states.count("timed"), states.count("wrong")
            click.echo(f"{device}: {right} of {len(states)} kernels are right and were timed, {wrong} are wrong")
    click.echo(f"Wrote {file}. Besides the times it names this machine, its packages and their folders.")


def _compile(model: str) -> None:
    """Load a model on the CPU, which compiles its kernels."""
    check_model(model)
    from auraflux.loading.load import load
    from auraflux.ops.simd.compile.ahead import wait_for_background
    from auraflux.ops.simd.compile.cache_folder import CACHE_FOLDER

    load(model, device="cpu")
    wait_for_background()
    if not CACHE_FOLDER:
        raise Failure("compiled kernels cannot be cached: there is no writable folder. Set AURAFLUX_CACHE.")
    cached = sum(1 for _ in Path(CACHE_FOLDER).rglob("*.nbc"))
    click.echo(f"Compiled the kernels of {model}; {cached} kernels are cached in {CACHE_FOLDER}.")


def _machine() -> Iterator[Finding]:
    from auraflux.machine import free_nbytes, this_machine

    machine = this_machine()
    yield Finding("cpu", "ok", machine.cpu)
    yield Finding("architecture", "ok", machine.architecture)
    yield Finding("system", "ok", machine.system)
    yield Finding("cores", "ok", str(machine.cores))
    yield Finding("memory", "ok", f"{machine.memory_nbytes / 2**30:.1f} GiB, {free_nbytes() / 2**30:.1f} free")
    yield Finding("last-level cache", "ok", f"{machine.last_cache_nbytes / 2**20:.0f} MiB")


def _packages() -> Iterator[Finding]:
    import auraflux
    from auraflux.machine import versions

    yield Finding("auraflux", "ok", auraflux.__version__)
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    for name, version in versions(*NEEDED).items():
        yield _package(name, version, "missing", f"pip install {name}")


def _package(name: str, version: str | None, without: str, advice: str) -> Finding:
    return Finding(name, "ok", version) if version is not None else Finding(name, without, "not installed", advice)


def _kernels() -> Iterator[Finding]:
    """Yield the instruction set, threads and JIT cache of the CPU kernels."""
    try:
        from auraflux.ops.simd.compile.cache_folder import CACHE_FOLDER, PREBUILT
        from auraflux.ops.simd.isa import ISA
        from auraflux.ops.simd.processor import cpu_features
        from auraflux.ops.simd.threads import default_count
    except ModuleNotFoundError as err:
        yield Finding("numba kernels", "missing", f"{err.name} is not installed; the torch reference runs instead")
        return
    features = cpu_features()
    known = [name for names in FEATURES.values() for name in names if name in features]
    yield Finding("cpu features", "ok", " ".join(known) or "none that kernels use")
    advice = "no dot-product instructions found: quantized weights are slow" if ISA.name == "portable" else None
    yield Finding("instructions", "missing" if advice else "ok", f"{ISA.name}, {ISA.lanes} lanes", advice)
    # counted without starting them, which would compile a kernel: the first command that computes says that it compiles
    yield Finding("threads", "ok", str(default_count()))
    if PREBUILT is None:
        yield Finding("prebuilt kernels", "optional", "none for this version and processor", PREBUILT_ADVICE)
    else:
        yield Finding("prebuilt kernels", "ok", f"{PREBUILT.level.name}, {PREBUILT.folder}")
    yield _cache(CACHE_FOLDER)


def _cache(folder: str) -> Finding:
    if folder and os.access(folder, os.W_OK):
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        return Finding("compiled kernels", "ok", f"{folder}, {size / 2**20:.1f} MiB")
    advice = "kernels are compiled again in every process; set AURAFLUX_CACHE to a writable folder"
    return Finding("compiled kernels", "missing", "no writable folder", advice)


def _gpu() -> Iterator[Finding]:
    try:
        import torch
    except ModuleNotFoundError:
        return
    if not torch.cuda.is_available():
        yield Finding("gpu", "optional", "no NVIDIA GPU found by torch")
        return
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        value = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
        yield Finding(f"gpu {number}", "ok", value)
        yield _prebuilt_cuda(10 * gpu.major + gpu.minor)


def _prebuilt_cuda(arch: int) -> Finding:
    """Return which prebuilt kernels a GPU loads."""
    name = f"prebuilt kernels, sm_{arch}"
    try:
        from auraflux.ops.gpu.prebuilt import installed_for
    except ImportError as err:
        return Finding(name, "optional", f"{err.name or 'triton'} is not installed, so no CUDA kernels run")
    found = installed_for(arch)
    if found is None:
        return Finding(name, "optional", "none for this version, this Triton and this GPU", CUDA_ADVICE)
    return Finding(name, "ok", str(found.folder))


def _optional() -> Iterator[Finding]:
    from auraflux.machine import versions

    for name, version in versions(*OPTIONAL).items():
        yield _package(name, version, "optional", f"for {OPTIONAL[name]}: pip install {PIP_NAMES.get(name, name)}")


def _show(found: dict[str, list[Finding]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from auraflux.cli.output.screen import stdout

    console = stdout()
    for title, findings in found.items():
        console.print(f"[bold]{title}[/bold]")
        table = Table.grid(padding=(0, 2))
        for one in findings:
            advice = f" [dim]({escape(one.advice)})[/dim]" if one.advice is not None else ""
            table.add_row(SYMBOLS[one.state], one.name, escape(one.value) + advice)
        console.print(table)
