"""Build the wheel auraflux-kernels-cpu: `python -m wheels.build dist`.

Each level is compiled by a process of its own, which has Numba compile for the level's processor instead of this one.
"""

import argparse
import gc
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import llvmlite
import numba

from auraflux.machine import usable_cores
from auraflux.ops.simd.compile.levels import LEVELS, Level
from auraflux.ops.simd.compile.prebuilt import PACKAGE, Prebuilt, folder_name
from auraflux.ops.simd.processor import machine
from wheels.archive import ROOT, About, files_of, write_wheel

PYTHON = f"{sys.version_info[0]}{sys.version_info[1]}"
# the oldest system that PyTorch's wheels run on; machine code of kernels asks for no more
SYSTEM = "manylinux_2_28"
ABOUT = About(
    package=PACKAGE,
    module="Compiled CPU kernels of auraflux, a folder per processor level; read by auraflux/ops/simd/compile/prebuilt.py.",
    summary="Compiled CPU kernels of auraflux, for a first token without compiling",
    tag=f"cp{PYTHON}-none-{SYSTEM}_{machine()}",
    python=f"=={PYTHON[0]}.{PYTHON[1:]}.*",
    # kernels of other versions would not be loaded
    requires=(f"numba=={numba.__version__}", f"llvmlite=={llvmlite.__version__}"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the wheel is written")
    parser.add_argument("--levels", default=",".join(level.name for level in levels()), help="separated by commas")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        _compile(given.only, given.folder)
        return
    with tempfile.TemporaryDirectory() as made:
        with ThreadPoolExecutor(usable_cores()) as threads:
            list(threads.map(partial(_start, Path(made)), _chosen(given.levels)))
        wheel = write_wheel(ABOUT, files_of(Path(made) / PACKAGE, "*.kernel"), given.folder)
    print(f"{wheel}: {wheel.stat().st_size / 2**20:.1f} MiB")


def levels() -> tuple[Level, ...]:
    """Return the levels of this machine's architecture."""
    return LEVELS.get(machine(), ())


def _chosen(names: str) -> list[Level]:
    known = {level.name: level for level in levels()}
    if unknown := set(names.split(",")) - set(known):
        sys.exit(f"There are no levels {', '.join(sorted(unknown))} on {machine()}. There are {', '.join(known)}.")
    return [known[name] for name in names.split(",")]


def _start(folder: Path, level: Level) -> None:
    """Compile a level in another process."""
    cpu = {"NUMBA_CPU_NAME": level.cpu, "NUMBA_CPU_FEATURES": level.llvm_features, "AURAFLUX_ISA": level.isa}
    environment = {**os.environ, **cpu, "AURAFLUX_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "wheels.build", folder, "--only", level.name]
    subprocess.run(command, check=True, env=environment, cwd=ROOT)


def _compile(name: str, folder: Path) -> None:
    """Compile all kernels of a level into a folder."""
    from auraflux.ops.simd.compile import cache_folder

    [level] = _chosen(name)
    places = Prebuilt(folder / PACKAGE / folder_name(cache_folder.SOURCES, level), level, is_written=True)
    # before other modules are imported: some have functions that are cached
    cache_folder.PREBUILT, cache_folder.CACHE_FOLDER = places, ""
    from wheels.kernels import compile_functions, kernels

    gc.disable()
    compile_functions()
    for kernel in dict.fromkeys(kernels()):
        kernel.compile()
    print(f"{name}: {sum(1 for _ in places.folder.iterdir())} kernels", flush=True)


if __name__ == "__main__":
    main()
