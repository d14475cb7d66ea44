"""The JIT cache: compiled CPU kernels on disk, shared between runs.

Numba stores pickles, which run code when they are loaded, so a folder is used only if nobody else can write to it. The cache
never causes a failure: an unreadable entry is compiled again, an unwritable one is not stored, and one log line says so.
"""

import contextlib
import hashlib
import logging
import os
import pickle
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llvmlite import binding as llvm
from numba.core import caching, ccallback, config, dispatcher, registry
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompileResult
from numba.core.runtime import rtsys

from auraflux.errors import SettingsError
from auraflux.machine import cache_folder

log = logging.getLogger("auraflux")

VERSIONS = 4  # of the kernels that stay on disk
DIGEST_NBYTES = 32  # of SHA-256
UNFINISHED_S = 600.0  # an older temporary file belongs to a process that died
OURS = re.compile(r"[0-9a-f]{16}")
settings: Any = config  # its attributes are created at import time, which type checkers cannot see


def open_folder(version: str) -> str:
    """Create the folder for one version of the kernels; return "" and log one warning where no folder is usable."""
    try:
        base = cache_folder()
        folder = base / "numba" / version
        base.parent.mkdir(parents=True, exist_ok=True)
        for each in (base, folder.parent, folder):
            each.mkdir(mode=0o700, exist_ok=True)
            if (reason := _unsafe(each)) is not None:
                return _no_cache(reason)
        os.utime(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            return _no_cache(f"{folder} cannot be written")
    except SettingsError as err:
        return _no_cache(str(err).rstrip("."))
    except OSError as err:
        return _no_cache(f"{err.filename or folder} cannot be used: {err.strerror}")
    _remove_old(folder)
    _remove_unfinished(folder)
    return str(folder)


def _no_cache(reason: str) -> str:
    log.warning(
        "The JIT cache is off, so every run compiles its kernels again: %s. Set AURAFLUX_CACHE to a folder that can be used.",
        reason,
    )
    return ""


def _unsafe(folder: Path) -> str | None:
    """Return why other users could have written to a folder; None if they could not."""
    found = folder.stat()
    if found.st_uid not in (os.geteuid(), 0):
        return f"{folder} belongs to another user"
    shared = found.st_mode & stat.S_IWGRP and found.st_gid != os.getegid()
    if shared or found.st_mode & stat.S_IWOTH:
        return f"other users may write to {folder}"
    return None


def _remove_old(folder: Path) -> None:
    """Remove all but the newest versions, and no other files."""
    with contextlib.suppress(OSError):
        versions = [each for each in folder.parent.iterdir() if OURS.fullmatch(each.name) and _is_ours(each)]
        for old in sorted(versions, key=lambda each: each.stat().st_mtime, reverse=True)[VERSIONS:]:
            shutil.rmtree(old, ignore_errors=True)


def _remove_unfinished(folder: Path) -> None:
    """Remove temporary files of processes that were killed; newer ones may still be in use."""
    with contextlib.suppress(OSError):
        for path in folder.glob("*.tmp.*"):
            if time.time() - path.stat().st_mtime > UNFINISHED_S:
                path.unlink(missing_ok=True)


def _is_ours(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


class _Files(caching.IndexDataCacheFile):
    """The files of one function, one for each signature, named after it.

    Numba numbers them in an index, and two processes that compile at once give one number to two signatures.
    """

    def __init__(self, folder: str, name: str):
        super().__init__(folder, name, None)
        self._stem = os.path.join(folder, name)

    def _path(self, key: Any) -> str:
        return f"{self._stem}.{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.nbc"

    def has(self, key: Any) -> bool:
        return os.path.exists(self._path(key))

    def load(self, key: Any) -> Any:
        try:
            content = read_entry(Path(self._path(key)))
            return None if content is None else pickle.loads(content)
        # includes pickles of another version of a package
        except Exception:
            return None

    def save(self, key: Any, data: Any) -> None:
        with self._open_for_write(self._path(key)) as file:
            file.write(with_digest(self._dump(data)))


def with_digest(content: bytes) -> bytes:
    """Return the bytes of an entry, which begin with a digest of the others."""
    return hashlib.sha256(content).digest() + content


def read_entry(path: Path) -> bytes | None:
    """Return the content of an entry; None if it is missing or corrupt."""
    with contextlib.suppress(OSError):
        found = path.read_bytes()
        return found[DIGEST_NBYTES:] if with_digest(found[DIGEST_NBYTES:]) == found else None
    return None


_said = threading.Event()


def _say_unwritten(folder: str, err: Exception) -> None:
    if not _said.is_set():
        _said.set()
        reason = getattr(err, "strerror", None) or "there is not enough memory"
        log.warning("Compiled kernels cannot be cached in %s: %s.", folder, reason)


class _StoredCode(JITCodeLibrary):
    """Machine code from a file. Numba would also parse its bitcode, which is needed only to link it into other code."""

    def __init__(self, codegen: Any, name: str, code: bytes):
        super().__init__(codegen, name)
        self._code, self._finalized = code, True
        engine = codegen._engine
        engine._ee.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()

    def defines(self, name: str) -> bool:
        """Return whether the table of names has a name, which ends with a zero byte there."""
        return name.encode() + b"\0" in self._code

    def get_pointer_to_function(self, name: str) -> int:
        # LLVM exits the process when it is asked for a name that nothing defines
        return int(self.codegen._engine.get_function_address(name)) if self.defines(name) else 0


def rebuild(target_context: Any, stored: tuple[Any, ...]) -> Any:
    """Load what `CompileResult._reduce` returned.

    Numba's own caches refresh all registries of types and functions before, which only a compilation needs.
    """
    rtsys.initialize(target_context)
    (name, _, (code, _)), descriptor, environment, signature, in_objects, lifted, _, reload_init, others = stored
    library = _StoredCode(target_context.codegen(), name, code)
    entry = target_context.get_executable(library, descriptor, environment)
    for each in others:
        if library.defines(each.env_name):
            library.codegen.set_env(each.env_name, each)
    facts = {"library": library, "environment": environment, "entry_point": entry, "fndesc": descriptor, "signature": signature}
    facts |= {"objectmode": in_objects, "lifted": lifted, "reload_init": reload_init, "referenced_envs": others}
    contexts = {"target_context": target_context, "typing_context": target_context.typing_context}
    return CompileResult(**{**dict.fromkeys(CompileResult._fields), **facts, **contexts})


class _Found(caching.CompileResultCacheImpl):
    """Looks only in the chosen folder."""

    _locator_classes = [caching.UserProvidedCacheLocator]  # noqa: RUF012

    def rebuild(self, target_context: Any, payload: Any) -> Any:
        return rebuild(target_context, payload)


class _KernelCache(caching.FunctionCache):
    """Numba's cache of one function, without failures."""

    _impl_class = _Found

    def __init__(self, function: Any):
        super().__init__(function)
        self._cache_file = _Files(str(self._cache_path), self._impl.filename_base)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        return self._load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except (OSError, MemoryError) as err:
            _say_unwritten(str(self._cache_path), err)

    def has(self, sig: Any) -> bool:
        key = self._index_key(sig, registry.cpu_target.target_context.codegen())
        # numba declares it as its own kind of file
        file: Any = self._cache_file
        return file.has(key)


def _cache_of(function: Any) -> Any:
    try:
        return _KernelCache(function)
    except (OSError, RuntimeError):
        # Numba found no folder it can write to
        return caching.NullCache()


def is_cached(folder: str, function: Any, signature: Any) -> bool:
    """Return whether a folder has compiled code of a function; it may still be unreadable."""
    with cached_in(folder):
        cache = _cache_of(function)
        if not isinstance(cache, _KernelCache):
            return False
        return cache.has(signature)


_lock = threading.RLock()


@contextlib.contextmanager
def cached_in(folder: str, wrapped: Callable[[Any, Any], Any] = lambda function, cache: cache) -> Iterator[None]:
    """Cache what Numba compiles with `cache=True` in a folder while inside; with "", nowhere.

    wrapped  called with a function and its cache; returns the cache that Numba uses
    """

    def made(function: Any) -> Any:
        return wrapped(function, _cache_of(function) if folder else caching.NullCache())

    places: tuple[Any, ...] = (dispatcher, ccallback)
    with _lock:
        before = settings.CACHE_DIR, [place.FunctionCache for place in places]
        settings.CACHE_DIR = folder
        for place in places:
            place.FunctionCache = made
        try:
            yield
        finally:
            settings.CACHE_DIR = before[0]
            for place, cache in zip(places, before[1], strict=True):
                place.FunctionCache = cache
