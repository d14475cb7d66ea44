"""The disk tier of the prefix cache: one file per evicted prefix, found by its tokens, with a checksum.

A file is written under another name and then renamed, so an incomplete one is never read. It holds users' prompts: only the
owner may read it.
"""

import hashlib
import json
import logging
import os
import threading
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from auraflux.cache.kv_sequence import Snapshot
from auraflux.cache.layers.recurrent import StateImage
from auraflux.cache.pages import PageImage
from auraflux.cache.prefix.radix import Node, RadixTree
from auraflux.errors import SettingsError

log = logging.getLogger("auraflux")

VERSION, SUFFIX, PARTIAL_SUFFIX = 2, ".prefix", ".part"
MAX_PENDING_WRITES = 4  # further prefixes are not written
MAX_CANDIDATES = 64  # files with equally long shared prefixes
IDS = "ids"


def check_folder(folder: Path) -> None:
    """Raise if a folder cannot be created or written to, without creating it: called before a model is loaded."""
    nearest = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        reason = "is not writable" if nearest.is_dir() else "is a file"
        raise SettingsError(f"prefixes cannot be stored in {folder}: {nearest} {reason}.")


@dataclass(eq=False)
class PrefixFile:
    """A file on disk: the tokens of its prefix, and its size."""

    path: Path
    ids: list[int]
    nbytes: int
    node: Node["PrefixFile"] = field(init=False)


class PrefixDisk:
    """The prefix files of one cache format, within a disk budget, in LRU order.

    folder        of the files; several models may share it
    limit_nbytes  budget of all files together
    format        of the snapshots that this cache can restore
    """

    def __init__(self, folder: Path, limit_nbytes: int, format: str):
        self.folder, self.limit_nbytes, self.format = folder, limit_nbytes, format
        self._tree: RadixTree[PrefixFile] = RadixTree()
        # the least recently used first
        self._files: dict[PrefixFile, None] = {}
        self._writer = ThreadPoolExecutor(1, "auraflux-prefixes")
        self._pending: set[Future[None]] = set()
        # the writer thread adds and drops files during lookups
        self._lock = threading.RLock()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._scan_folder()
        except OSError as err:
            raise SettingsError(f"prefixes cannot be stored in {folder}: {err}.") from err

    def __len__(self) -> int:
        return len(self._files)

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self._files)

    def find(self, prompt: list[int], truncatable: bool) -> tuple[PrefixFile | None, int]:
        """Return the file with the longest prefix of a prompt, and the length of that prefix.

        truncatable  sequences can be truncated anywhere; otherwise only files that are entirely a prefix count
        """
        with self._lock:
            for file, common in islice(self._tree.find(prompt[:-1]), MAX_CANDIDATES):
                if common and (truncatable or common == len(file.ids)):
                    return file, common
        return None, 0

    def load(self, file: PrefixFile) -> "Future[Snapshot | None]":
        """Read a file in the background; None, and the file is dropped, if it is damaged."""
        return self._writer.submit(self._load, file)

    def save(self, ids: list[int], snapshot: Snapshot) -> None:
        """Write a prefix in the background; skip it if it is on disk already, or too many writes are pending."""
        if len(self._pending) >= MAX_PENDING_WRITES or self.find([*ids, -1], True)[1] >= len(ids):
            return
        task = self._writer.submit(self._save, ids[: snapshot.length], snapshot)
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    def wait(self) -> None:
        """Wait for all pending writes."""
        for task in list(self._pending):
            task.result()

    def _save(self, ids: list[int], snapshot: Snapshot) -> None:
        path = self.folder / f"{hashlib.sha256(repr((self.format, ids)).encode()).hexdigest()[:32]}{SUFFIX}"
        try:
            tensors, about = _serialize(ids, snapshot)
            content = save(tensors, {"about": json.dumps({**about, "version": VERSION, "format": self.format})})
            if len(content) > self.limit_nbytes:
                return
            self._evict(len(content))
            _write(path, content)
        except (OSError, MemoryError) as err:
            reason = getattr(err, "strerror", None) or "there is not enough memory"
            log.warning("a prefix of %d tokens was not written to disk: %s", len(ids), reason)
            return
        self._add(PrefixFile(path, ids, len(content)))

    def _load(self, file: PrefixFile) -> Snapshot | None:
        try:
            snapshot = _read(file.path, self.format)
        except (OSError, RuntimeError, SafetensorError, ValueError, KeyError) as err:
            log.warning("dropped a damaged prefix file: %s", type(err).__name__)
            self._drop(file)
            return None
        with self._lock:
            if file in self._files:
                os.utime(file.path)
                self._files[file] = self._files.pop(file)
        return snapshot

    def _scan_folder(self) -> None:
        """Index the usable files; delete incomplete and damaged ones, and those over the budget."""
        for path in self.folder.glob(f"*{PARTIAL_SUFFIX}"):
            path.unlink(missing_ok=True)
        for path in sorted(self.folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime):
            try:
                ids = _read_ids(path, self.format)
            # unreadable now, for which torch raises RuntimeError; another run may be able to read it
            except (OSError, RuntimeError):
                continue
            except (SafetensorError, ValueError, KeyError):
                path.unlink(missing_ok=True)
                continue
            self._add(PrefixFile(path, ids, path.stat().st_size))
        self._evict(0)

    def _add(self, file: PrefixFile) -> None:
        with self._lock:
            file.node = self._tree.insert(file.ids, file)
            self._files[file] = None

    def _evict(self, nbytes: int) -> None:
        while self._files and self.nbytes + nbytes > self.limit_nbytes:
            self._drop(next(iter(self._files)))

    def _drop(self, file: PrefixFile) -> None:
        with self._lock:
            if file in self._files:
                del self._files[file]
                self._tree.remove(file.node, file)
        file.path.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    partial = path.with_suffix(PARTIAL_SUFFIX)
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _serialize(ids: list[int], snapshot: Snapshot) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, parts = {IDS: torch.tensor(ids, dtype=torch.int32)}, []
    for number, image in enumerate(snapshot.images):
        parts.append({"first": getattr(image, "first", None), "count": len(image.tensors)})
        tensors |= {f"{number}.{i}": tensor.contiguous() for i, tensor in enumerate(image.tensors)}
    facts = {"length": snapshot.length, "cache": snapshot.format, "parts": parts}
    return tensors, {"facts": facts, "sum": _checksum(facts, tensors)}


def _checksum(facts: Any, tensors: dict[str, Tensor]) -> int:
    """Return the CRC of a snapshot: its facts, and the names, dtypes, shapes and contents of its tensors."""
    found = zlib.crc32(json.dumps(facts).encode())
    for name, tensor in sorted(tensors.items()):
        found = zlib.crc32(repr((name, tensor.dtype, tuple(tensor.shape))).encode(), found)
        found = zlib.crc32(tensor.view(torch.uint8).numpy().data, found)
    return found


def _read_metadata(content: safe_open, format: str) -> dict[str, Any]:
    about = json.loads((content.metadata() or {})["about"])
    if not isinstance(about, dict) or about["version"] != VERSION or about["format"] != format:
        raise ValueError("it belongs to another model or cache format")
    return about


def _read_ids(path: Path, format: str) -> list[int]:
    with safe_open(str(path), "pt") as content:
        _read_metadata(content, format)
        found = content.get_tensor(IDS)
    if found.dtype != torch.int32 or found.dim() != 1:
        raise ValueError("its tokens are not a list of int32")
    return found.tolist()


def _read(path: Path, format: str) -> Snapshot:
    with safe_open(str(path), "pt") as content:
        about = _read_metadata(content, format)
        tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    facts = about["facts"]
    # a valid checksum means that `_serialize` made the rest
    if _checksum(facts, tensors) != about["sum"]:
        raise ValueError("its checksum does not match")
    images = []
    for number, part in enumerate(facts["parts"]):
        found = [tensors[f"{number}.{i}"] for i in range(part["count"])]
        images.append(StateImage(found) if part["first"] is None else PageImage(part["first"], found))
    return Snapshot(facts["cache"], facts["length"], tuple(images))
