"""Compile the CUDA kernels for Hopper, on any machine: `python -m auraflux.ops.hopper.compile [FAMILY ...] [--first] [--json]`.

What is compiled is what the ops' cases launch (see `capture.py`): every build that the shapes of large models launch
(`gpu_cases.py`), which is hot, and of the others one for each kernel and the types of its arguments. Printed are registers a
thread, bytes of stack (what did not fit into registers) and of shared memory, and, where all builds are made, how often lanes
are gathered: if the compiler cannot see that a branch is the same for a warp, it writes every shuffle and matrix product after
it for lanes that may have parted.
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
from typing import Any

from auraflux.ops._cases import all_cases
from auraflux.ops._dispatch import families
from auraflux.ops.gpu_cases import HOT
from auraflux.ops.hopper.capture import TARGET, Build, launched

GATHERED = "WARPSYNC.COLLECTIVE"
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True)
class Report:
    """What became of one build; `error` says why it did not compile."""

    family: str
    name: str
    hot: bool
    registers: int = 0
    spilled_nbytes: int = 0
    gathered: int = 0
    shared_nbytes: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Wanted:
    """A build to be compiled; a hot one is part of decoding a token or of prefill: it may not spill registers."""

    build: Build
    hot: bool


Find = Callable[[str], list[Wanted]]


def launches(family: str) -> list[Wanted]:
    """All that a family's cases launch."""
    found = []
    for case, hot in [*((case, True) for case in HOT), *((case, False) for case in all_cases())]:
        if case.op.family == family:
            builds, alike = launched(case)
            found += [*(Wanted(build, hot) for build in builds), *(Wanted(build, False) for build in alike)]
    return found


def chosen(found: Sequence[Wanted]) -> list[Wanted]:
    """What is worth compiling of many launches: all that is hot, and of the rest one for each kernel and its types."""
    hot = {repr(each.build): each for each in found if each.hot}
    known = {_types(each.build) for each in hot.values()}
    others = {_types(each.build): each for each in reversed(found) if _types(each.build) not in known}
    return [*hot.values(), *others.values()]


def _types(build: Build) -> str:
    return f"{build.kernel} {build.signature}"


def first_of_each(found: Sequence[Wanted]) -> list[Wanted]:
    """Of each kernel the first hot build, which is mostly the smallest, or else the last; and a hot one of more tuples.

    A tuple stands for something that a call may lack, such as a shared expert. Of kernels with a tile of codes in registers,
    which Triton takes up to ten seconds to lay out, it is the smallest tile.
    """
    others = {each.build.kernel: each for each in found if not each.hot}
    first = {**others, **{each.build.kernel: each for each in reversed(found) if each.hot}}
    tiled = sorted((each for each in found if _tile(each)), key=_tile, reverse=True)
    first |= {each.build.kernel: each for each in tiled}
    hot = [each for each in found if each.hot]
    names = dict.fromkeys(each.build.kernel for each in hot)
    fullest = {name: max((each for each in hot if each.build.kernel == name), key=_arguments) for name in names}
    return [*first.values(), *(each for name, each in fullest.items() if _tuples(each) > _tuples(first[name]))]


def _tuples(each: Wanted) -> int:
    return sum(isinstance(kind, tuple) for kind in each.build.signature.values())


def _arguments(each: Wanted) -> tuple[int, int]:
    """How many tuples there are, and how many arguments and members of tuples that are not constant."""
    return _tuples(each), len(each.build.types)


def _tile(each: Wanted) -> int:
    """Codes in a tile of a kernel that takes rows of them times a vector; 0 of other kernels and other weights."""
    sizes = {name: each.build.constants.get((place,)) for place, name in enumerate(each.build.signature)}
    return (sizes.get("ROWS") or 0) * (sizes.get("UNITS") or 0) * bool(sizes.get("BITS"))


def compile_one(each: Wanted, instructions: bool = True) -> Report:
    """Compile a build; to look at its instructions takes as long again."""
    build, hot = each.build, each.hot
    try:
        return Report(build.family, build.name, hot, *_compile(build, instructions))
    except Exception as err:
        return Report(build.family, build.name, hot, error=f"{type(err).__name__}: {err}")


def _compile(build: Build, instructions: bool) -> tuple[int, int, int, int]:
    import triton
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = build.find()
    make = GluonASTSource if kernel.is_gluon() else ASTSource
    source = make(kernel, build.signature, build.constants, build.attributes)
    made: Any = triton.compile(source, target=TARGET, options=dict(build.options))
    return *_resources(made.asm["cubin"], instructions), made.metadata.shared


def _resources(cubin: bytes, instructions: bool) -> tuple[int, int, int]:
    """Registers, bytes of stack and local memory, and gatherings of lanes, of the one kernel in a cubin."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", *["--dump-sass"] * instructions, file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = RESOURCES.search(text)
    if found is None:
        raise ValueError(f"cuobjdump says nothing of registers: {text!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local, text.count(GATHERED)


def compile_all(find: Find, sources: Sequence[str], first: bool, processes: int) -> list[Report]:
    """Compile what is found in some sources; of each kernel one build, if only the first is wanted."""
    with _workers(processes) as run:
        found = chosen([each for launched in run(find, sources) for each in launched])
        builds = first_of_each(found) if first else found
        return run(partial(compile_one, instructions=not first), builds)


@contextmanager
def _workers(processes: int) -> Iterator[Callable[..., list[Any]]]:
    """What calls a function with each of some values, in so many processes; a single one is this one."""
    if processes == 1:
        yield lambda function, values: [function(value) for value in values]
        return
    # spawned, not forked: LLVM and torch have threads by now
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield partial(pool.map, chunksize=1)


def command(module: str, about: str, sources: Sequence[str], find: Find, arguments: Sequence[str]) -> int:
    """Run a module that compiles what `find` finds in each source, or in those that are named."""
    parser = argparse.ArgumentParser(prog=module, description=about.splitlines()[0])
    parser.add_argument("source", nargs="*", help=f"one of {', '.join(sources)}; by default all")
    parser.add_argument("--first", action="store_true", help="of each kernel one build only")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="by default one for each core")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if strange := set(given.source) - set(sources):
        parser.error(f"{', '.join(sorted(strange))}: there is nothing of this name; there are {', '.join(sources)}")
    if os.environ.get("TRITON_INTERPRET"):
        parser.error("TRITON_INTERPRET is set; unset it: interpreted kernels cannot be compiled")
    reports = compile_all(find, given.source or sources, given.first, given.processes)
    if given.json:
        print(json.dumps([asdict(report) for report in reports]))
        return 0
    for r in reports:
        line = f"{r.registers:4} registers {r.spilled_nbytes:5} B stack {r.gathered:3} gathered {r.shared_nbytes:7} B shared"
        line = r.error or line
        print(f"{'hot' if r.hot else '   '} {line}  {r.family}.{r.name}")
    return any(r.error or (r.hot and (r.spilled_nbytes or r.gathered)) for r in reports)


if __name__ == "__main__":
    sys.exit(command("auraflux.ops.hopper.compile", __doc__ or "", families(), launches, sys.argv[1:]))
