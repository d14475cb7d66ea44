"""Where compiled CPU kernels are kept between runs, and what happens where they cannot be.

What Numba keeps are pickles, which run code when they are read. So a folder is used only if nobody else can write there. A
cache is never worth a failure: what cannot be read is compiled again, what cannot be written is not kept, and one sentence
says so.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numba.core import caching, ccallback, config, dispatcher, registry

from auraflux.errors import SettingsError
from auraflux.machine import cache_folder

log = logging.getLogger("auraflux")

KEPT = 4  # versions of the kernels
UNFINISHED_S = 600.0  # after which nobody writes a file any more
OURS = re.compile(r"[0-9a-f]{16}")
settings: Any = config  # its names are made when it is imported, out of sight of type checkers


def open_folder(version: str) -> str:
    """Make the folder for one version of the kernels; "" where there is none that can be used, which is said once."""
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
        "Compiled kernels are not kept, so every run compiles them anew: %s. Set AURAFLUX_CACHE to one that can be used.",
        reason,
    )
    return ""


def _unsafe(folder: Path) -> str | None:
    """Why somebody else might have put something into a folder."""
    found = folder.stat()
    if found.st_uid not in (os.geteuid(), 0):
        return f"{folder} belongs to another user"
    shared = found.st_mode & stat.S_IWGRP and found.st_gid != os.getegid()
    if shared or found.st_mode & stat.S_IWOTH:
        return f"other users may write to {folder}"
    return None


def _remove_old(folder: Path) -> None:
    """Remove all but the newest versions, and nothing that is not one."""
    with contextlib.suppress(OSError):
        versions = [each for each in folder.parent.iterdir() if OURS.fullmatch(each.name) and _is_ours(each)]
        for old in sorted(versions, key=lambda each: each.stat().st_mtime, reverse=True)[KEPT:]:
            shutil.rmtree(old, ignore_errors=True)


def _remove_unfinished(folder: Path) -> None:
    """Remove what was being written when a process was killed; what is newer may still be written to."""
    with contextlib.suppress(OSError):
        for path in folder.glob("*.tmp.*"):
            if time.time() - path.stat().st_mtime > UNFINISHED_S:
                path.unlink(missing_ok=True)


def _is_ours(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


class _Files(caching.IndexDataCacheFile):
    """The files of one function, one for each signature, named after it.

    Numba numbers them and keeps an index; two processes that compile at once then give one number to two signatures.
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
            content = Path(self._path(key)).read_bytes()
            digest, content = content[:32], content[32:]
            return pickle.loads(content) if hashlib.sha256(content).digest() == digest else None
        # also pickles of another version of a package
        except Exception:
            return None

    def save(self, key: Any, data: Any) -> None:
        content = self._dump(data)
        with self._open_for_write(self._path(key)) as file:
            file.write(hashlib.sha256(content).digest() + content)


_said = threading.Event()


def _say_unwritten(folder: str, err: Exception) -> None:
    if not _said.is_set():
        _said.set()
        reason = getattr(err, "strerror", None) or "there is not enough memory"
        log.warning("Compiled kernels cannot be kept in %s: %s.", folder, reason)


class _Found(caching.CompileResultCacheImpl):
    """Looks nowhere but in the folder that was chosen."""

    _locator_classes = [caching.UserProvidedCacheLocator]  # noqa: RUF012


class _KernelCache(caching.FunctionCache):
    """Numba's cache of one function, of which nothing can fail."""

    _impl_class = _Found

    def __init__(self, function: Any):
        super().__init__(function)
        self._cache_file = _Files(str(self._cache_path), self._impl.filename_base)

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except (OSError, MemoryError) as err:
            _say_unwritten(str(self._cache_path), err)

    def has(self, sig: Any) -> bool:
        key = self._index_key(sig, registry.cpu_target.target_context.codegen())
        return self._cache_file.has(key)


def _cache_of(function: Any) -> Any:
    try:
        return _KernelCache(function)
    except (OSError, RuntimeError):
        # Numba found no folder it can write to
        return caching.NullCache()


def is_kept(folder: str, function: Any, signature: Any) -> bool:
    """Whether compiled code of a function lies in a folder; not whether it can be read."""
    with kept_in(folder):
        cache = _cache_of(function)
        if not isinstance(cache, _KernelCache):
            return False
        return cache.has(signature)


_turn = threading.RLock()


@contextlib.contextmanager
def kept_in(folder: str) -> Iterator[None]:
    """Inside, what Numba compiles with `cache=True` is kept in that folder; with "", nowhere."""
    made = _cache_of if folder else lambda function: caching.NullCache()
    places: tuple[Any, ...] = (dispatcher, ccallback)
    with _turn:
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
