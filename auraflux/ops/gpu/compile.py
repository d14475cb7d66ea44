"""Compile the CUDA kernels on any machine: `python -m auraflux.ops.gpu.compile [FAMILY ...] [--gpu 8.9] [--first] [--json]`.

By default it compiles what Hopper launches, and what only older GPUs launch; with `--gpu`, what a GPU of that compute
capability launches. It compiles what the ops' cases launch (see `capture.py`): every variant that the shapes of large models
launch (`gpu_cases.py`), which are on the critical path of decode or prefill, and of the others one per kernel and the types of
its arguments. It prints registers per thread, bytes of stack (spilled registers) and of shared memory, and, where all
variants are compiled, the number of convergence barriers: where the compiler cannot see that a branch is warp-uniform, it emits
every later shuffle and matrix product for lanes that may have diverged.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

from auraflux.ops._cases import all_cases
from auraflux.ops._dispatch import families
from auraflux.ops.fake_gpu import SHARED_KB, Capability
from auraflux.ops.gpu.capture import GPUS, KernelVariant, variants_of
from auraflux.ops.gpu_cases import CRITICAL

CONVERGENCE = "WARPSYNC.COLLECTIVE"
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True)
class Report:
    """Resources of one compiled variant; `error` says why it did not compile."""

    family: str
    name: str
    critical: bool
    registers: int = 0
    spilled_nbytes: int = 0
    convergence_barriers: int = 0
    shared_nbytes: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Wanted:
    """A variant to compile; one on the critical path of decode or prefill may not spill registers."""

    variant: KernelVariant
    critical: bool


class Find(Protocol):
    """Return the variants that a source launches on some GPUs."""

    def __call__(self, source: str, gpus: Sequence[Capability] = GPUS) -> list[Wanted]: ...


def launches(source: str, gpus: Sequence[Capability] = GPUS) -> list[Wanted]:
    """Return all variants that the cases of a family, the source, launch on some GPUs."""
    found = []
    for case, critical in [*((case, True) for case in CRITICAL), *((case, False) for case in all_cases())]:
        if case.op.family == source:
            variants, invariants = variants_of(case, gpus)
            found += [*(Wanted(variant, critical) for variant in variants), *(Wanted(variant, False) for variant in invariants)]
    return found


def chosen(found: Sequence[Wanted]) -> list[Wanted]:
    """Select the variants worth compiling: all on the critical path, and of the rest one for each kernel and its types."""
    critical = {repr(each.variant): each for each in found if each.critical}
    known = {_types(each.variant) for each in critical.values()}
    others = {_types(each.variant): each for each in reversed(found) if _types(each.variant) not in known}
    return [*critical.values(), *others.values()]


def _types(variant: KernelVariant) -> str:
    return f"{variant.kernel} {variant.signature}"


def first_of_each(found: Sequence[Wanted]) -> list[Wanted]:
    """Select the first critical variant of each kernel, mostly the smallest, or else the last.

    And a critical one of more tuples.

    A tuple stands for an optional argument, such as a shared expert. Of kernels with a tile of codes in registers, which Triton
    takes up to ten seconds to lay out, it is the smallest tile.
    """
    others = {each.variant.kernel: each for each in found if not each.critical}
    first = {**others, **{each.variant.kernel: each for each in reversed(found) if each.critical}}
    tiled = sorted((each for each in found if _tile(each)), key=_tile, reverse=True)
    first |= {each.variant.kernel: each for each in tiled}
    critical = [each for each in found if each.critical]
    names = dict.fromkeys(each.variant.kernel for each in critical)
    fullest = {name: max((each for each in critical if each.variant.kernel == name), key=_arguments) for name in names}
    return [*first.values(), *(each for name, each in fullest.items() if _tuples(each) > _tuples(first[name]))]


def _tuples(each: Wanted) -> int:
    return sum(isinstance(kind, tuple) for kind in each.variant.signature.values())


def _arguments(each: Wanted) -> tuple[int, int]:
    """Return the number of tuples, and the number of arguments and tuple members that are not constant."""
    return _tuples(each), len(each.variant.types)


def _tile(each: Wanted) -> int:
    """Return the codes in a tile of a kernel that multiplies rows of them by a vector; 0 for other kernels."""
    sizes = {name: each.variant.constants.get((place,)) for place, name in enumerate(each.variant.signature)}
    return (sizes.get("ROWS") or 0) * (sizes.get("UNITS") or 0) * bool(sizes.get("BITS"))


def compile_one(each: Wanted, instructions: bool = True) -> Report:
    """Compile a variant; disassembling it doubles the time."""
    variant, critical = each.variant, each.critical
    try:
        return Report(variant.family, variant.name, critical, *_compile(variant, instructions))
    except Exception as err:
        return Report(variant.family, variant.name, critical, error=f"{type(err).__name__}: {err}")


def _compile(variant: KernelVariant, instructions: bool) -> tuple[int, int, int, int]:
    made = variant.compile()
    limit = SHARED_KB[variant.capability] << 10
    if made.metadata.shared > limit:
        raise ValueError(f"{made.metadata.shared} bytes of shared memory are needed; there are {limit}")
    return *_resources(made.asm["cubin"], instructions), made.metadata.shared


def _resources(cubin: bytes, instructions: bool) -> tuple[int, int, int]:
    """Return registers, bytes of stack and local memory, and convergence barriers of the one kernel in a cubin."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", *["--dump-sass"] * instructions, file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = RESOURCES.search(text)
    if found is None:
        raise ValueError(f"cuobjdump printed no register count: {text!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local, text.count(CONVERGENCE)


def compile_all(
    find: Find, sources: Sequence[str], first: bool, processes: int, gpus: Sequence[Capability] = GPUS,
    kernels: Sequence[str] = (),
) -> list[Report]:  # fmt: skip
    """Compile the variants found in some sources for some GPUs, of all or some kernels; with `first`, one of each kernel."""
    with _workers(processes) as run:
        found = chosen([each for launches in run(partial(find, gpus=gpus), sources) for each in launches])
        found = [each for each in found if not kernels or each.variant.kernel.rpartition(":")[2] in kernels]
        variants = first_of_each(found) if first else found
        return run(partial(compile_one, instructions=not first), variants)


@contextmanager
def _workers(processes: int) -> Iterator[Callable[..., list[Any]]]:
    """Yield a map over a number of processes; with one, over this process."""
    if processes == 1:
        yield lambda function, values: [function(value) for value in values]
        return
    # spawned, not forked: LLVM and torch have started threads
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield partial(pool.map, chunksize=1)


def command(module: str, about: str, sources: Sequence[str], find: Find, arguments: Sequence[str]) -> int:
    """Run a module that compiles what `find` finds in each source, or in those named on the command line."""
    parser = argparse.ArgumentParser(prog=module, description=about.splitlines()[0])
    parser.add_argument("source", nargs="*", help=f"one of {', '.join(sources)}; by default all")
    gpus = {f"{major}.{minor}": (major, minor) for major, minor in SHARED_KB}
    parser.add_argument("--gpu", choices=gpus, help="compute capability; by default 9.0, and 8.0 for what only that launches")
    parser.add_argument("--kernel", action="append", default=[], help="only this kernel; may be given several times")
    parser.add_argument("--first", action="store_true", help="compile one variant of each kernel")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="by default one for each core")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if unknown := set(given.source) - set(sources):
        parser.error(f"{', '.join(sorted(unknown))}: unknown name; known are {', '.join(sources)}")
    if os.environ.get("TRITON_INTERPRET"):
        parser.error("TRITON_INTERPRET is set; unset it: interpreted kernels cannot be compiled")
    wanted = GPUS if given.gpu is None else (gpus[given.gpu],)
    reports = compile_all(find, given.source or sources, given.first, given.processes, wanted, given.kernel)
    if given.json:
        print(json.dumps([asdict(report) for report in reports]))
        return 0
    for r in reports:
        line = f"{r.registers:4} registers {r.spilled_nbytes:5} B stack {r.convergence_barriers:3} convergence barriers"
        line += f" {r.shared_nbytes:7} B shared"
        line = r.error or line
        print(f"{'critical' if r.critical else '   '} {line}  {r.family}.{r.name}")
    return any(r.error or (r.critical and (r.spilled_nbytes or r.convergence_barriers)) for r in reports)


if __name__ == "__main__":
    sys.exit(command("auraflux.ops.gpu.compile", __doc__ or "", families(), launches, sys.argv[1:]))
