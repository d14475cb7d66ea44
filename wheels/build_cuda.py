"""Build the wheel auraflux-kernels-cuda: `python -m wheels.build_cuda dist`, on any machine.

Starts of servers on GPUs that are not there list the kernels (`fake_cuda.py`), and processes compile them.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
from functools import partial
from itertools import product
from pathlib import Path

import triton

from auraflux.bench.shapes import MAIN_SHAPES, shape_names
from auraflux.machine import usable_cores
from auraflux.ops.fake_gpu import SHARED_KB, Capability
from auraflux.ops.gpu.capture import KernelVariant
from auraflux.ops.gpu.prebuilt import CODE, METADATA, PACKAGE, Prebuilt, folder_name
from wheels.archive import About, files_of, write_wheel
from wheels.fake_cuda import start_variants

NAMED = {f"{major}.{minor}": (major, minor) for major, minor in SHARED_KB}
GPUS = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
ABOUT = About(
    package=PACKAGE,
    module="Compiled CUDA kernels of auraflux, a folder per GPU architecture; read by auraflux/ops/gpu/prebuilt.py.",
    summary="Compiled CUDA kernels of auraflux, for a server's first start without compiling",
    tag="py3-none-any",
    python=">=3.11",
    # kernels of other versions would not be loaded
    requires=(f"triton=={triton.__version__}",),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the wheel is written")
    parser.add_argument("--gpus", default=",".join(GPUS), help="compute capabilities, separated by commas; by default all")
    parser.add_argument("--shapes", default=",".join(MAIN_SHAPES), help="shapes of models, separated by commas")
    parser.add_argument("--processes", type=int, default=usable_cores(), help="by default one for each core")
    given = parser.parse_args()
    gpus, shapes = given.gpus.split(","), given.shapes.split(",")
    if unknown := {*gpus} - {*NAMED} | {*shapes} - {*shape_names()}:
        sys.exit(f"There are no {', '.join(sorted(unknown))}. GPUs: {', '.join(NAMED)}. Shapes: {', '.join(shape_names())}.")
    with tempfile.TemporaryDirectory() as made:
        build(Path(made), [NAMED[gpu] for gpu in gpus], shapes, given.processes)
        wheel = write_wheel(ABOUT, files_of(Path(made) / PACKAGE, f"*{METADATA}", f"*{CODE}"), given.folder)
    print(f"{wheel}: {wheel.stat().st_size / 2**20:.1f} MiB")


def build(folder: Path, gpus: list[Capability], shapes: list[str], processes: int) -> None:
    """Compile the kernels of some shapes for some GPUs into a folder."""
    os.environ["TRITON_CACHE_DIR"] = str(folder / "cache")
    # spawned, not forked: torch and LLVM start threads
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=64) as pool:
        found = pool.starmap(_find, product(shapes, gpus), chunksize=1)
        variants = {repr(variant): variant for each in found for variant in each}
        failed = pool.map(partial(_compile, folder / PACKAGE), variants.values(), chunksize=1)
    for each in filter(None, failed):
        print(each, file=sys.stderr)
    print(f"{len(variants)} kernels, {len(list(filter(None, failed)))} failed", flush=True)


def _find(shape: str, gpu: Capability) -> list[KernelVariant]:
    return start_variants(shape, gpu)


def _compile(folder: Path, variant: KernelVariant) -> str | None:
    """Compile a variant into the folder of its GPU; return why it could not be, as far as that is known."""
    prebuilt = Prebuilt(folder / folder_name(variant.target.arch))
    try:
        prebuilt.save(variant.source(), variant.parsed_options(), variant.compile())
    except Exception as err:
        return f"{variant.capability} {variant.name}: {type(err).__name__}: {str(err)[:200]}"
    return None


if __name__ == "__main__":
    main()
