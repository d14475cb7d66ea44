"""Prefixes that memory has no room for, on disk: one file each, found by its tokens, checked when it is read back.

A file is written under another name and then renamed, so one that was broken off is never seen. It holds what users wrote:
only the owner may read it.
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

from auraflux.cache.pages import PageImage
from auraflux.cache.radix import Node, RadixTree
from auraflux.cache.recurrent import StateImage
from auraflux.cache.sequence import Snapshot
from auraflux.errors import SettingsError

log = logging.getLogger("auraflux")

VERSION, ENDING, UNFINISHED = 2, ".prefix", ".part"
WAITING = 4  # texts that are written out at a time; more are let go
LOOKED_AT = 64  # files that begin equally well
IDS = "ids"


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be made or written to, before a model is loaded; nothing is made yet."""
    nearest = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        reason = "may not be written to" if nearest.is_dir() else "is a file"
        raise SettingsError(f"prefixes cannot be kept in {folder}: {nearest} {reason}.")


@dataclass(eq=False)
class Saved:
    """A file: the tokens of its text, and its size."""

    path: Path
    ids: list[int]
    nbytes: int
    node: Node["Saved"] = field(init=False)


class PrefixDisk:
    """Files of texts of one model and one kind of cache, within a budget; those used longest ago go first.

    folder        of them; other models may have theirs beside them
    limit_nbytes  of all together
    format        what a snapshot must be of, to be of use
    """

    def __init__(self, folder: Path, limit_nbytes: int, format: str):
        self.folder, self.limit_nbytes, self.format = folder, limit_nbytes, format
        self._tree: RadixTree[Saved] = RadixTree()
        # the one used longest ago first
        self._saved: dict[Saved, None] = {}
        self._writer = ThreadPoolExecutor(1, "auraflux-prefixes")
        self._under_way: set[Future[None]] = set()
        # the writer adds and drops files while others look for them
        self._lock = threading.RLock()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._take_stock()
        except OSError as err:
            raise SettingsError(f"prefixes cannot be kept in {folder}: {err}.") from err

    def __len__(self) -> int:
        return len(self._saved)

    @property
    def nbytes(self) -> int:
        return sum(saved.nbytes for saved in self._saved)

    def find(self, prompt: list[int], cuttable: bool) -> tuple[Saved | None, int]:
        """Find the file that has most of a prompt, and how many of its tokens.

        cuttable  a text can be cut anywhere; otherwise only a whole one is of use
        """
        with self._lock:
            for saved, common in islice(self._tree.find(prompt[:-1]), LOOKED_AT):
                if common and (cuttable or common == len(saved.ids)):
                    return saved, common
        return None, 0

    def load(self, saved: Saved) -> "Future[Snapshot | None]":
        """Read a file; None if it is not what was written, and then it is gone."""
        return self._writer.submit(self._load, saved)

    def save(self, ids: list[int], snapshot: Snapshot) -> None:
        """Write a text out, beside whatever else is done; nothing if it is there, or the disk is too slow."""
        if len(self._under_way) >= WAITING or self.find([*ids, -1], True)[1] >= len(ids):
            return
        task = self._writer.submit(self._save, ids[: snapshot.length], snapshot)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    def wait(self) -> None:
        """Wait until all is written."""
        for task in list(self._under_way):
            task.result()

    def _save(self, ids: list[int], snapshot: Snapshot) -> None:
        path = self.folder / f"{hashlib.sha256(repr((self.format, ids)).encode()).hexdigest()[:32]}{ENDING}"
        try:
            tensors, about = _spelled(ids, snapshot)
            content = save(tensors, {"about": json.dumps({**about, "version": VERSION, "format": self.format})})
            if len(content) > self.limit_nbytes:
                return
            self._make_room(len(content))
            _write(path, content)
        except (OSError, MemoryError) as err:
            reason = getattr(err, "strerror", None) or "there is not enough memory"
            log.warning("a prefix of %d tokens was not written to disk: %s", len(ids), reason)
            return
        self._add(Saved(path, ids, len(content)))

    def _load(self, saved: Saved) -> Snapshot | None:
        try:
            snapshot = _read(saved.path, self.format)
        except (OSError, RuntimeError, SafetensorError, ValueError, KeyError) as err:
            log.warning("a prefix on disk is not what was written, and dropped: %s", type(err).__name__)
            self._drop(saved)
            return None
        with self._lock:
            if saved in self._saved:
                os.utime(saved.path)
                self._saved[saved] = self._saved.pop(saved)
        return snapshot

    def _take_stock(self) -> None:
        """Find the files that are of use; what was broken off goes, and what is over the budget."""
        for path in self.folder.glob(f"*{UNFINISHED}"):
            path.unlink(missing_ok=True)
        for path in sorted(self.folder.glob(f"*{ENDING}"), key=lambda path: path.stat().st_mtime):
            try:
                ids = _ids_of(path, self.format)
            # it cannot be read at present, of which torch has a RuntimeError; another run may have more luck
            except (OSError, RuntimeError):
                continue
            except (SafetensorError, ValueError, KeyError):
                path.unlink(missing_ok=True)
                continue
            self._add(Saved(path, ids, path.stat().st_size))
        self._make_room(0)

    def _add(self, saved: Saved) -> None:
        with self._lock:
            saved.node = self._tree.insert(saved.ids, saved)
            self._saved[saved] = None

    def _make_room(self, nbytes: int) -> None:
        while self._saved and self.nbytes + nbytes > self.limit_nbytes:
            self._drop(next(iter(self._saved)))

    def _drop(self, saved: Saved) -> None:
        with self._lock:
            if saved in self._saved:
                del self._saved[saved]
                self._tree.remove(saved.node, saved)
        saved.path.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    unfinished = path.with_suffix(UNFINISHED)
    try:
        number = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(number)
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def _spelled(ids: list[int], snapshot: Snapshot) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, parts = {IDS: torch.tensor(ids, dtype=torch.int32)}, []
    for number, image in enumerate(snapshot.images):
        parts.append({"first": getattr(image, "first", None), "count": len(image.tensors)})
        tensors |= {f"{number}.{i}": tensor.contiguous() for i, tensor in enumerate(image.tensors)}
    facts = {"length": snapshot.length, "cache": snapshot.format, "parts": parts}
    return tensors, {"facts": facts, "sum": _sum(facts, tensors)}


def _sum(facts: Any, tensors: dict[str, Tensor]) -> int:
    """Over all that a snapshot is made of: facts, and names, types, shapes and numbers of tensors."""
    found = zlib.crc32(json.dumps(facts).encode())
    for name, tensor in sorted(tensors.items()):
        found = zlib.crc32(repr((name, tensor.dtype, tuple(tensor.shape))).encode(), found)
        found = zlib.crc32(tensor.view(torch.uint8).numpy().data, found)
    return found


def _about(content: safe_open, format: str) -> dict[str, Any]:
    about = json.loads((content.metadata() or {})["about"])
    if not isinstance(about, dict) or about["version"] != VERSION or about["format"] != format:
        raise ValueError("it is of another model, or of another kind of cache")
    return about


def _ids_of(path: Path, format: str) -> list[int]:
    with safe_open(str(path), "pt") as content:
        _about(content, format)
        found = content.get_tensor(IDS)
    if found.dtype != torch.int32 or found.dim() != 1:
        raise ValueError("its tokens are not a list of whole numbers")
    return found.tolist()


def _read(path: Path, format: str) -> Snapshot:
    with safe_open(str(path), "pt") as content:
        about = _about(content, format)
        tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    facts = about["facts"]
    # from here on it is what `_spelled` made
    if _sum(facts, tensors) != about["sum"]:
        raise ValueError("it is not what was written")
    images = []
    for number, part in enumerate(facts["parts"]):
        found = [tensors[f"{number}.{i}"] for i in range(part["count"])]
        images.append(StateImage(found) if part["first"] is None else PageImage(part["first"], found))
    return Snapshot(facts["cache"], facts["length"], tuple(images))
