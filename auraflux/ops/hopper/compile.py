"""Compile the CUDA kernels for Hopper, on any machine: `python -m auraflux.ops.hopper.compile [FAMILY ...] [--first] [--json]`.

Each family's `cuda` lists in `KERNELS` what is worth building (see `Build`). Printed are registers a thread, bytes of stack
(what did not fit into registers), bytes of shared memory, and, where all builds are made, how often lanes are gathered: if the
compiler cannot see that a branch is the same for a warp, it writes every shuffle and matrix product after it for lanes that may
have parted.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

from auraflux.ops._dispatch import families

HOPPER = 90
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


def builds(only: Sequence[str] = (), first: bool = False) -> list[tuple[str, int]]:
    """Every build there is, or the first one of each kernel, as its family and its place in the family's list."""
    found = []
    for name in [name for name in families() if not only or name in only]:
        kernels = [build.kernel for build in _listed(name)]
        found += [(name, place) for place, kernel in enumerate(kernels) if not first or kernels.index(kernel) == place]
    return found


def _listed(family: str) -> list:
    return getattr(importlib.import_module(f"auraflux.ops.{family}.cuda"), "KERNELS", [])


def compile_one(where: tuple[str, int], instructions: bool = True) -> Report:
    """Compile a build; to look at its instructions takes as long again."""
    family, place = where
    build = _listed(family)[place]
    try:
        return Report(family, build.name, build.hot, *_compile(build, instructions))
    except Exception as err:
        return Report(family, build.name, build.hot, error=f"{type(err).__name__}: {err}")


def _compile(build, instructions: bool) -> tuple[int, int, int, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel, types = build.kernel, iter(build.types.split())
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in build.constants:
            signature[name] = "constexpr"
            continue
        kind, _, multiple = next(types).partition(":")
        signature[name] = kind
        if multiple or kind.startswith("*"):
            attributes[(place,)] = [["tt.divisibility", int(multiple or 16)]]
    if spare := list(types):
        raise ValueError(f"{build.name}: more types than arguments: {' '.join(spare)}")
    constants = {(kernel.arg_names.index(name),): value for name, value in build.constants.items()}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", HOPPER, 32), options=dict(build.options))
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


def compile_all(only: Sequence[str] = (), first: bool = False) -> list[Report]:
    found = builds(only, first)
    # spawned, not forked: LLVM and torch have threads by now
    with multiprocessing.get_context("spawn").Pool(min(os.cpu_count() or 1, max(1, len(found)))) as pool:
        return pool.map(partial(compile_one, instructions=not first), found, chunksize=1)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="auraflux.ops.hopper.compile", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("family", nargs="*")
    parser.add_argument("--first", action="store_true", help="of each kernel only the first build listed")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET"):
        parser.error("TRITON_INTERPRET is set; unset it: interpreted kernels cannot be compiled")
    reports = compile_all(given.family, given.first)
    if given.json:
        print(json.dumps([asdict(report) for report in reports]))
        return 0
    for r in reports:
        line = f"{r.registers:4} registers {r.spilled_nbytes:5} B stack {r.gathered:3} gathered {r.shared_nbytes:7} B shared"
        line = r.error or line
        print(f"{'hot' if r.hot else '   '} {line}  {r.family}.{r.name}")
    return any(r.error or (r.hot and (r.spilled_nbytes or r.gathered)) for r in reports)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
