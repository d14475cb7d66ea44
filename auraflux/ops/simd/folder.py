"""Where compiled code is kept: a folder named after a digest of the CPU ops' sources.

Numba itself looks only at the file of the function it compiles, and would run stale code after a change in a module that
function was built from.
"""

import hashlib
import os
import platform
from contextlib import AbstractContextManager
from pathlib import Path

import numba

from auraflux.kernel_cache import kept_in, open_folder


def cpu_sources() -> list[Path]:
    """The modules that compiled code may be made of: all ops but what runs on a GPU or makes inputs."""
    ops = Path(__file__).parent.parent
    found = (path for path in ops.rglob("*.py") if not {"cuda", "hopper"} & {*path.relative_to(ops).parts[:-1], path.stem})
    return sorted(path for path in found if not path.stem.endswith(("cases", "_inputs")))


def _sources_digest() -> str:
    digest = hashlib.sha256(f"{numba.__version__} {platform.machine()} {os.environ.get('AURAFLUX_ISA', '')}".encode())
    for path in cpu_sources():
        source = path.read_bytes()
        digest.update(f"{path} {len(source)}".encode() + source)
    return digest.hexdigest()[:16]


CACHE_FOLDER = open_folder(_sources_digest())


def nothing_compiled() -> bool:
    """Whether the next kernels will have to be compiled: none of these sources is in the cache yet."""
    return not CACHE_FOLDER or next(Path(CACHE_FOLDER).rglob("*.nbc"), None) is None


def our_cache() -> AbstractContextManager[None]:
    """Inside, what Numba compiles with `cache=True` is kept in that folder."""
    return kept_in(CACHE_FOLDER)
