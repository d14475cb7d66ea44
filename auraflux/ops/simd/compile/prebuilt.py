"""Prebuilt kernels: machine code that the package auraflux-kernels-cpu installs, read before anything is compiled.

An entry is found only by the kernel's own code, in a folder named after a digest of all kernels' sources, the versions of
Python and Numba, and the level (levels.py): code of other sources or for another processor is never loaded. Entries are
pickles, which run code when they are loaded, so only the folder next to this package is read: it is trusted like the package.
"""

import hashlib
import pickle
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite
import numba
from numba.core import caching
from numba.core.registry import CPUDispatcher
from numba.core.serialize import dumps

from auraflux.jit_cache import read_entry, rebuild, with_digest
from auraflux.ops.simd.compile.levels import LEVELS, Level, level_for
from auraflux.ops.simd.isa import ISA
from auraflux.ops.simd.processor import config, cpu_features, machine

PACKAGE = "auraflux_kernels_cpu"
ENDING = ".kernel"


class Prebuilt:
    """Compiled kernels of one level.

    folder      of its entries
    is_written  entries are written, not read: the wheel is built
    """

    def __init__(self, folder: Path, level: Level, is_written: bool = False):
        self.folder, self.level, self.is_written = folder, level, is_written

    def path(self, function: Any, signature: Any) -> Path:
        """Return the file of a function's machine code; raise TypeError if variants of it cannot be told apart."""
        key = f"{_described(function)} {signature}".encode() + function.__code__.co_code
        return self.folder / f"{function.__name__}.{hashlib.sha256(key).hexdigest()[:32]}{ENDING}"

    def has(self, function: Any, signature: Any) -> bool:
        with suppress(TypeError):
            return not self.is_written and self.path(function, signature).exists()
        return False

    def load(self, function: Any, signature: Any, target_context: Any) -> Any:
        """Load a function's machine code; None if there is none, or if it cannot be read."""
        if self.is_written:
            return None
        # an unreadable entry is compiled again, as in the JIT cache
        with suppress(Exception):
            data = read_entry(self.path(function, signature))
            return None if data is None else rebuild(target_context, pickle.loads(data))
        return None

    def save(self, function: Any, signature: Any, compiled: Any) -> None:
        """Write a function's machine code."""
        library, descriptor, environment, signed, in_objects, lifted, _, *rest = compiled._reduce()
        name, kind, (code, _) = library
        # without bitcode, which only links the function into another, and without printed types
        reduced = (name, kind, (code, b"")), descriptor, environment, signed, in_objects, lifted, "", *rest
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path(function, signature).write_bytes(with_digest(dumps(reduced)))


def _described(value: Any) -> str:
    """Describe a function and the values that it closes over; the same in every process and folder."""
    if isinstance(value, CPUDispatcher):
        value = value.py_func
    if isinstance(value, FunctionType):
        cells = ", ".join(_described(cell.cell_contents) for cell in value.__closure__ or ())
        return f"{value.__module__}.{value.__qualname__}:{value.__code__.co_firstlineno}({cells})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_described, value))})"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    raise TypeError(f"{value!r} is neither a function nor a type nor a plain value")


class PrebuiltCache(caching._Cache):
    """A Numba cache that looks for prebuilt machine code before it asks another cache."""

    def __init__(self, prebuilt: Prebuilt, function: Any, cache: Any):
        self._prebuilt, self._function, self._cache = prebuilt, function, cache

    @property
    def cache_path(self) -> Any:
        return self._cache.cache_path

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = self._prebuilt.load(self._function, sig, target_context)
        return self._cache.load_overload(sig, target_context) if found is None else found

    def save_overload(self, sig: Any, data: Any) -> None:
        if self._prebuilt.is_written:
            self._prebuilt.save(self._function, sig, data)
        self._cache.save_overload(sig, data)

    def enable(self) -> None:
        self._cache.enable()

    def disable(self) -> None:
        self._cache.disable()

    def flush(self) -> None:
        self._cache.flush()


def folder_name(sources: str, level: Level) -> str:
    """Return the name of a level's folder."""
    versions = (*sys.version_info[:2], sys.implementation.name, numba.__version__, llvmlite.__version__, platform.system())
    return f"{level.name}-{hashlib.sha256(repr((sources, versions, level)).encode()).hexdigest()[:16]}"


def installed_for(sources: str, site: Path) -> Prebuilt | None:
    """Return the prebuilt kernels for this processor; None if there are none for these sources and versions.

    sources  digest of the kernels' sources
    site     the folder that this package is in
    """
    if config.CPU_NAME is not None or config.CPU_FEATURES is not None:
        # the user compiles for another processor
        return None
    level = level_for(LEVELS.get(machine(), ()), ISA.name, cpu_features())
    if level is None:
        return None
    folder = site / PACKAGE / folder_name(sources, level)
    return Prebuilt(folder, level) if folder.is_dir() else None


Wrap = Callable[[Any, Any], Any]  # a function and its cache -> its cache


def wrapped_by(prebuilt: Prebuilt | None) -> Wrap:
    """Return a function that puts prebuilt kernels before the cache of a function."""
    return lambda function, cache: cache if prebuilt is None else PrebuiltCache(prebuilt, function, cache)
