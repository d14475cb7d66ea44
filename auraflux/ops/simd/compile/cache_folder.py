"""The places of compiled CPU kernels: the JIT cache folder, named after a digest of their sources, and prebuilt kernels.

Numba's own cache checks only the file of the compiled function, and would run stale code after a change in a module that the
function calls.
"""

import hashlib
import platform
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numba

from auraflux import jit_cache
from auraflux.jit_cache import cached_in, open_folder
from auraflux.ops.simd.compile.prebuilt import Prebuilt, installed_for, wrapped_by
from auraflux.ops.simd.isa import ISA

PACKAGE = Path(__file__).parents[3]


def cpu_sources() -> list[Path]:
    """Return the modules that compiled code may depend on: all ops except GPU kernels and test inputs."""
    ops = PACKAGE / "ops"
    found = (
        path
        for path in ops.rglob("*.py")
        if not {"cases", "cuda", "gpu", "hopper"} & {*path.relative_to(ops).parts[:-1], path.stem}
    )
    return sorted(path for path in found if not path.stem.endswith(("cases", "_inputs")))


def _sources_digest() -> str:
    digest = hashlib.sha256()
    for path in cpu_sources():
        source = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE).as_posix()} {len(source)}".encode() + source)
    return digest.hexdigest()


def _version(sources: str) -> str:
    facts = numba.__version__, platform.machine(), ISA.name, str(PACKAGE), sources
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


SOURCES = _sources_digest()
CACHE_FOLDER = open_folder(_version(SOURCES))
PREBUILT: Prebuilt | None = installed_for(SOURCES, PACKAGE.parent)


def is_cache_empty() -> bool:
    """Return whether all kernels of these sources are still to be compiled."""
    if PREBUILT is not None:
        return False
    return not CACHE_FOLDER or next(Path(CACHE_FOLDER).rglob("*.nbc"), None) is None


def is_stored(function: Any, signature: Any) -> bool:
    """Return whether the machine code of a function is prebuilt or in the JIT cache."""
    if PREBUILT is not None and PREBUILT.has(function, signature):
        return True
    return bool(CACHE_FOLDER) and jit_cache.is_cached(CACHE_FOLDER, function, signature)


def our_cache() -> AbstractContextManager[None]:
    """Make Numba look here for functions compiled inside the block with `cache=True`."""
    return cached_in(CACHE_FOLDER, wrapped_by(PREBUILT))
