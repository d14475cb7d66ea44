"""Predict the cycles of the inner loops of CPU kernels on other processors: `make cycles`.

A kernel's IR is compiled for another processor with llvmlite, its hottest loop is found in the assembly, and llvm-mca simulates
that. The work of a loop is counted by its dot products. Loads are assumed to hit the L1 cache, so this is the arithmetic bound,
not the memory bound.
"""

import argparse
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir

from auraflux.errors import AurafluxError, BackendError
from auraflux.ops.simd import isa, vectors

ROOT = Path(__file__).parents[2]  # of the repository, from which `bench` is imported
# multiplications of bytes in one instruction
DOTS = {"sdot": 16, "udot": 16, "usdot": 16, "smmla": 32, "usmmla": 32, "ummla": 32}
X86_DOT = re.compile(r"(?:\{vex\}\s+)?v(?:pdpbusd|pmaddubsw)\s.*%(?P<kind>[xyz])mm")
X86_BYTES = {"x": 16, "y": 32, "z": 64}
REALS = {"base", "least", "factor"}  # arguments that are float32; here their bits


class Target(NamedTuple):
    """A processor as LLVM knows it, and the instructions kernels use there."""

    triple: str
    cpu: str
    features: str
    isa: str


ARM, X86 = "aarch64-linux-gnu", "x86_64-linux-gnu"
TARGETS = {
    "neoverse-n1": Target(ARM, "neoverse-n1", "+dotprod", "neon-dotprod"),
    "apple-m1": Target(ARM, "apple-m1", "+dotprod", "neon-dotprod"),
    "neoverse-v1": Target(ARM, "neoverse-v1", "+dotprod,+i8mm", "neon-i8mm"),
    "neoverse-n2": Target(ARM, "neoverse-n2", "+dotprod,+i8mm", "neon-i8mm"),
    "neoverse-v2": Target(ARM, "neoverse-v2", "+dotprod,+i8mm", "neon-i8mm"),
    "apple-m2": Target(ARM, "apple-m2", "+dotprod,+i8mm", "neon-i8mm"),
    "ampere1": Target(ARM, "ampere1", "+dotprod", "neon-dotprod"),
    "haswell": Target(X86, "haswell", "", "avx2"),
    "alderlake": Target(X86, "alderlake", "", "avx-vnni"),
    "icelake-server": Target(X86, "icelake-server", "+prefer-256-bit", "avx512-vnni"),
}


class Loop(NamedTuple):
    """An inner loop.

    kernel     made by `vectors.kernel`
    constants  its compile-time constants
    fixed      numbers for some of its arguments, by name
    bits       of a code
    met        products made with every code: tokens or heads, times bytes of each
    trips      of the inner loop, where one is left
    """

    name: str
    kernel: Any
    constants: tuple[Any, ...]
    fixed: dict[str, int]
    bits: int
    met: int
    trips: int = 1


class Cost(NamedTuple):
    """The cost of one iteration of a loop; `codes` are those it reads."""

    loop: str
    target: str
    instructions: float
    cycles: float
    codes: float
    nbytes: float


def loops() -> list[Loop]:
    """Return the loops, compiled for the instructions that `isa.ISA` names at the first call."""
    from auraflux.ops.linear.cpu.forms import Form
    from auraflux.ops.linear.cpu.microkernels import rows_times_tokens
    from auraflux.ops.linear.cpu.panels import has_panels, rows_times_tile
    from auraflux.ops.turboquant.cpu.int8.key_scores import key_score_loop
    from auraflux.ops.turboquant.cpu.int8.value_sums import add_value_loop

    found = []
    for bits in (4, 8, 2):
        form = Form(8, bits, 64, "bf16").text
        found.append(Loop(f"linear {bits} bits, 1 token", rows_times_tokens, (form, 1, 0), {}, bits, 1, 2))
    for bits in (4, 8, 2):
        many, spec = isa.ISA.tokens, Form(8, bits, 64, "bf16")
        by_tile, by_tokens = (rows_times_tile, (spec.text, many, 1)), (rows_times_tokens, (spec.text, many, 1))
        kernel, constants = by_tile if has_panels(spec) else by_tokens
        found.append(Loop(f"linear {bits} bits, {many} of many", kernel, constants, {}, 8, many, 2))
    for bits, planes in ((8, 3), (4, 2)):
        fixed = {"heads": 4, "quads": bits, "key_nbytes": 0, "value_nbytes": 0}
        found.append(Loop(f"scores k{bits}, 4 heads", key_score_loop, (bits,), fixed, bits, 4 * planes, bits))
    fixed = {"heads": 4, "groups": 128 // isa.ISA.lanes}
    found.append(Loop("values v4, 4 heads", add_value_loop, (4,), fixed, 4, 8, 128 // isa.ISA.lanes))
    return found


def assembly(kernel: Any, constants: tuple[Any, ...], fixed: dict[str, int], target: Target) -> str:
    """Compile a kernel alone, as the function `kernel` of its arguments that are not fixed, as integers."""
    parameters = list(inspect.signature(kernel.build).parameters)[1 + len(constants) :]
    free = [name for name in parameters if name not in fixed]
    module = ir.Module("cycles")
    module.triple = target.triple
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [vectors.I64] * len(free)), "kernel")
    b = ir.IRBuilder(function.append_basic_block())
    given = dict(zip(free, function.args, strict=True))
    for name in REALS & given.keys():
        given[name] = b.bitcast(b.trunc(given[name], vectors.I32), vectors.F32)
    values = [vectors.at(fixed[name]) if name in fixed else given[name] for name in parameters]
    kernel.build(vectors.StrictBuilder(b), *constants, *values)
    b.ret_void()
    return optimized(str(module), target)


def optimized(source: str, target: Target) -> str:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(target.triple).create_target_machine(cpu=target.cpu, features=target.features, opt=3)
    module = llvm.parse_assembly(source)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    return machine.emit_assembly(module)


def products(line: str) -> int:
    """Return the byte multiplications of an instruction."""
    if found := X86_DOT.match(line):
        return X86_BYTES[found["kind"]]
    return DOTS.get(line.split(maxsplit=1)[0].split(".")[0], 0) if line else 0


def hot_loop(text: str, trips: int) -> list[str]:
    """Return the instructions of one iteration of the loop around all dot products, with its inner loop unrolled."""
    # the comments of ARM and of x86
    lines = [re.split(r"//|#\s|##", line)[0].strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not (line.startswith(".") and not line.endswith(":"))]
    at = {line[:-1]: n for n, line in enumerate(lines) if line.endswith(":")}
    spans = []
    for n, line in enumerate(lines):
        label = re.search(r"(\.L\w+)$", line)
        if label and at.get(label[1], n) < n:
            spans.append((at[label[1]], n))
    counts = [sum(products(line) for line in lines[a:z]) for a, z in spans]
    hot = [span for span, count in zip(spans, counts, strict=True) if count]
    if not hot:
        raise BackendError("the assembly of a kernel has no loop with dot products.")
    inner = min(hot, key=lambda span: span[1] - span[0])
    around = [span for span in hot if span[0] <= inner[0] and inner[1] <= span[1] and span != inner]
    outer = min(around, key=lambda span: span[1] - span[0], default=inner)
    if outer != inner:
        body = lines[outer[0] : inner[0]] + lines[inner[0] : inner[1] + 1] * trips + lines[inner[1] + 1 : outer[1] + 1]
    else:
        body = lines[inner[0] : inner[1] + 1]
    return [line for line in body if not line.endswith(":")]


def find_simulator() -> str:
    """Find the newest llvm-mca: older ones know fewer processors."""
    installed = sorted(Path("/usr/lib").glob("llvm-*/bin/llvm-mca"), key=lambda path: int(path.parts[3].split("-")[1]))
    found = str(installed[-1]) if installed else shutil.which("llvm-mca")
    if found is None:
        raise BackendError("llvm-mca was not found on the path or in /usr/lib/llvm-*; Debian's package llvm-19 has it.")
    return found


def simulate(body: Iterable[str], target: Target) -> tuple[float, float]:
    """Return the instructions and cycles of one iteration, by llvm-mca."""
    command = [find_simulator(), f"-mtriple={target.triple}", f"-mcpu={target.cpu}", f"-mattr={target.features}"]
    command += ["-iterations=100", "-json", "-"]
    done = subprocess.run(command, input="\n".join(body), capture_output=True, text=True, check=False)
    if done.returncode:
        raise BackendError(f"llvm-mca ended with {done.returncode}: {done.stderr.strip()[:300]}")
    summary = json.loads(done.stdout)["CodeRegions"][0]["SummaryView"]
    return summary["Instructions"] / summary["Iterations"], summary["TotalCycles"] / summary["Iterations"]


def cost(loop: Loop, name: str) -> Cost:
    target = TARGETS[name]
    body = hot_loop(assembly(loop.kernel, loop.constants, loop.fixed, target), loop.trips)
    codes = sum(map(products, body)) / loop.met
    return Cost(loop.name, name, *simulate(body, target), codes, codes * loop.bits / 8)


def costs_for(name: str) -> list[Cost]:
    """Compile and simulate all loops for one processor; once in a process, whose kernels it changes."""
    isa.ISA = isa.ISAS[TARGETS[name].isa]
    return [cost(loop, name) for loop in loops()]


def table(costs: list[Cost]) -> str:
    lines = ["| loop | processor | instructions | cycles | codes a cycle | bytes a cycle |", "|---|---|---|---|---|---|"]
    for c in costs:
        numbers = f"{c.instructions:.0f} | {c.cycles:.1f} | {c.codes / c.cycles:.2f} | {c.nbytes / c.cycles:.2f}"
        lines.append(f"| {c.loop} | {c.target} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", help=f"processors, of {', '.join(TARGETS)}; all without")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.json:
        print(json.dumps(costs_for(args.targets[0])))
        return
    find_simulator()
    found = []
    for name in args.targets or TARGETS:
        # kernels are built for one set of instructions in a process
        command = [sys.executable, "-m", "bench.lab.cycles", "--json", name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BackendError(f"{name}: {done.stderr.strip()}")
        found += [Cost(*row) for row in json.loads(done.stdout)]
    print(table(found))


if __name__ == "__main__":
    try:
        main()
    except AurafluxError as error:
        sys.exit(str(error))
