"""Build the wheel auraflux-kernels-cpu: `python -m wheels.build dist`.

Each level is compiled by a process of its own, which has Numba compile for the level's processor instead of this one.
"""

import argparse
import base64
import gc
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import llvmlite
import numba

import auraflux
from auraflux.machine import usable_cores
from auraflux.ops.simd.compile.levels import LEVELS, Level
from auraflux.ops.simd.compile.prebuilt import PACKAGE, Prebuilt, folder_name
from auraflux.ops.simd.processor import machine

ROOT = Path(__file__).parents[1]
NAME = "auraflux-kernels-cpu"
PYTHON = f"{sys.version_info[0]}{sys.version_info[1]}"
# the oldest system that PyTorch's wheels run on; machine code of kernels asks for no more
SYSTEM = "manylinux_2_28"
DATE = (1980, 1, 1, 0, 0, 0)  # of all files, so that equal contents give equal wheels
ABOUT = '"""Compiled CPU kernels of auraflux, a folder per processor level; read by auraflux/ops/simd/compile/prebuilt.py."""\n'


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
        given.folder.mkdir(parents=True, exist_ok=True)
        wheel = write_wheel(Path(made) / PACKAGE, given.folder)
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


def write_wheel(package: Path, folder: Path) -> Path:
    """Write a wheel of the compiled kernels."""
    version = auraflux.__version__
    stem, tag = f"{PACKAGE}-{version}", f"cp{PYTHON}-none-{SYSTEM}_{machine()}"
    contents = {f"{PACKAGE}/__init__.py": ABOUT.encode(), f"{stem}.dist-info/licenses/LICENSE": (ROOT / "LICENSE").read_bytes()}
    contents |= {f"{PACKAGE}/{path.relative_to(package)}": path.read_bytes() for path in sorted(package.rglob("*.kernel"))}
    contents[f"{stem}.dist-info/METADATA"] = "\n".join([*_metadata(version), ""]).encode()
    about = ["Wheel-Version: 1.0", "Generator: auraflux", "Root-Is-Purelib: true", f"Tag: {tag}", ""]
    contents[f"{stem}.dist-info/WHEEL"] = "\n".join(about).encode()
    record = f"{stem}.dist-info/RECORD"
    contents[record] = "\n".join([*map(_recorded, contents.items()), f"{record},,", ""]).encode()
    wheel = folder / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in contents.items():
            entry = zipfile.ZipInfo(name, DATE)
            entry.external_attr, entry.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return wheel


def _metadata(version: str) -> Iterator[str]:
    yield from ("Metadata-Version: 2.4", f"Name: {NAME}", f"Version: {version}")
    yield "Summary: Compiled CPU kernels of auraflux, for a first token without compiling"
    yield from ("License-Expression: Apache-2.0", "License-File: LICENSE", f"Requires-Python: =={PYTHON[0]}.{PYTHON[1:]}.*")
    # kernels of other versions would not be loaded
    yield from (f"Requires-Dist: auraflux=={version}", f"Requires-Dist: numba=={numba.__version__}")
    yield f"Requires-Dist: llvmlite=={llvmlite.__version__}"


def _recorded(entry: tuple[str, bytes]) -> str:
    """Return the line of a file in the wheel's RECORD."""
    name, content = entry
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}"


if __name__ == "__main__":
    main()
