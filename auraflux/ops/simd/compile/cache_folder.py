"""The JIT cache folder of CPU kernels, named after a digest of their sources.

Numba's own cache checks only the file of the compiled function, and would run stale code after a change in a module that the
function calls.
"""

import hashlib
import os
import platform
from contextlib import AbstractContextManager
from pathlib import Path

import numba

from auraflux.jit_cache import cached_in, open_folder


def cpu_sources() -> list[Path]:
    """Return the modules that compiled code may depend on: all ops except GPU kernels and test inputs."""
    ops = Path(__file__).parents[2]
    found = (
        path
        for path in ops.rglob("*.py")
        if not {"cases", "cuda", "gpu", "hopper"} & {*path.relative_to(ops).parts[:-1], path.stem}
    )
    return sorted(path for path in found if not path.stem.endswith(("cases", "_inputs")))


def _sources_digest() -> str:
    digest = hashlib.sha256(f"{numba.__version__} {platform.machine()} {os.environ.get('AURAFLUX_ISA', '')}".encode())
    for path in cpu_sources():
        source = path.read_bytes()
        digest.update(f"{path} {len(source)}".encode() + source)
    return digest.hexdigest()[:16]


CACHE_FOLDER = open_folder(_sources_digest())


def is_cache_empty() -> bool:
    """Return whether no kernel of these sources is in the JIT cache."""
    return not CACHE_FOLDER or next(Path(CACHE_FOLDER).rglob("*.nbc"), None) is None


def our_cache() -> AbstractContextManager[None]:
    """Make Numba use this folder for functions compiled inside the block with `cache=True`."""
    return cached_in(CACHE_FOLDER)
