"""Writing a model so that its experts can be read from disk one by one: see `expert_files` for how they lie there.

A packed folder is what `convert` writes, with the experts in files of their own. It is written as `<name>.partial` and renamed
when it is whole. A journal in it says which files are, so that a second run goes on where the first one was stopped.
"""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from auraflux.errors import FormatError
from auraflux.quant import check_format
from auraflux.weights import expert_files
from auraflux.weights.convert import Family, Shards, check_paths, copy_others, further, mlx_config
from auraflux.weights.destination import put_in_place, working_folder
from auraflux.weights.disk import sync
from auraflux.weights.expert_files import write_format, write_layer
from auraflux.weights.journal import NAME, Journal, digest, discard, stamps
from auraflux.weights.packing import Layer, Packing, write_file
from auraflux.weights.stored import Checkpoint

SHARD_NBYTES = 1 << 28  # of the other weights; as much of them is in memory
PARTIAL = ".partial"

Report = Callable[[str, int, int], None]  # what is done, bytes so far, bytes in all


def pack(
    checkpoint: Checkpoint,
    family: Family,
    target: Path,
    *,
    lanes: int,
    bits: int | None = None,
    group: int = 64,
    force: bool = False,
    report: Report = lambda what, done, total: None,
    add: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Write a checkpoint as a folder whose experts can be read one by one, or go on with that.

    lanes   rows that lie side by side: `ISA.lanes` for the CPU kernels, 1 for a GPU
    bits    to which weights are rounded, see `convert`; None leaves all as they are
    force   replace a model folder that is there, and begin again if there is a part of one
    report  called with what is written, and how many bytes of how many
    add     puts further files into the folder, such as a tokenizer
    """
    if bits is not None:
        check_format(bits, group)
    target = target.absolute()
    _check_target(checkpoint, target, force)
    options: dict[str, Any] = {"bits": bits, "group": group, "lanes": lanes}
    config = family.Config.from_hf(checkpoint.config)
    beyond = further(checkpoint, family, config)
    plan = Packing(checkpoint, family.rename, None, **options, beyond=beyond)
    family.Model(config, plan)
    plan.done()
    if not plan.layers:
        raise FormatError(f"{checkpoint.path} has no experts, so there is nothing to pack.")
    folder = target.with_name(target.name + PARTIAL)
    try:
        if force:
            discard(folder)
        files = checkpoint.files()
        head = {"version": expert_files.VERSION, "source": digest(files), "stamps": stamps(files), **options}
        journal = Journal(folder, head)
        try:
            run = _Run(folder, plan, journal, report)
            run.check_room()
            wanted = {**options, "beyond": beyond}
            run.write_rest(lambda shards, advance: _construct(family, config, checkpoint, shards, advance, wanted))
            run.write_experts()
            run.write_manifest(checkpoint)
            copy_others(checkpoint.path, folder)
            add(folder)
            _finish(folder, target, lambda: check_paths(checkpoint, target, force))
        finally:
            journal.close()
    except OSError as err:
        kept = f" What is done is kept in {folder}; the same command goes on with it." if folder.exists() else ""
        raise FormatError(f"{target} cannot be written: {err.strerror or err}.{kept}") from err
    return target


def _check_target(checkpoint: Checkpoint, target: Path, force: bool) -> None:
    """Refuse a folder that cannot be written; one that a run left in its last step is made whole."""
    try:
        with working_folder(target):
            if (target / expert_files.FOLDER / expert_files.MANIFEST).exists():
                (target / NAME).unlink(missing_ok=True)
            check_paths(checkpoint, target, force)
    except OSError as err:
        raise FormatError(f"{target} cannot be written: {err.strerror or err}.") from err


def _construct(
    family: Family, config: Any, checkpoint: Checkpoint, shards: Shards, advance: Callable[[int], None], options: dict[str, Any]
) -> dict[str, Any]:
    weights = Packing(checkpoint, family.rename, shards, **options, advance=advance)
    family.Model(config, weights)
    return weights.formats


def _finish(folder: Path, target: Path, check: Callable[[], None]) -> None:
    """Give a whole folder its name."""
    sync(folder)
    with working_folder(target) as aside:
        put_in_place(folder, target, aside, check)
        (target / NAME).unlink()
        sync(target)
        sync(target.parent)


class _Run:
    """One run of writing a packed folder."""

    def __init__(self, folder: Path, plan: Packing, journal: Journal, report: Report):
        self.folder, self.plan, self.journal, self.report = folder, plan, journal, report
        self.experts = folder / expert_files.FOLDER
        self.experts.mkdir(exist_ok=True)
        self.done = {entry["file"]: entry for entry in journal.entries if "file" in entry and self._whole(entry)}
        self.rest = next((entry for entry in journal.entries if "rest" in entry), None)

    def _whole(self, entry: dict[str, Any]) -> bool:
        path = self.experts / entry["file"]
        return path.exists() and path.stat().st_size == entry["nbytes"]

    def check_room(self) -> None:
        """Refuse to begin what cannot be ended."""
        needed = sum(layer.nbytes for layer in self.plan.layers if layer.file not in self.done)
        if self.rest is None:
            # dense weights have 16 bits or more
            needed += self.plan.rest_nbytes * (16 if self.plan.bits is None else self.plan.bits + 1) // 16
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise FormatError(
                f"{self.folder} needs {needed / 1e9:.2f} GB more, and its disk has {free / 1e9:.2f} GB left. "
                "Make room, or name a folder on another disk."
            )

    def write_rest(self, construct: Callable[[Shards, Callable[[int], None]], dict[str, Any]]) -> None:
        """Write all that is no expert."""
        if self.rest is not None:
            return
        # also what safetensors had under a name of its own when it was killed
        for path in self.folder.iterdir():
            if path.is_file() and path.name != NAME:
                path.unlink()
        shards, done, total = Shards(self.folder, SHARD_NBYTES), 0, self.plan.rest_nbytes

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            self.report("other weights", done, total)

        formats = construct(shards, advance)
        shards.close()
        for path in self.folder.glob("*.safetensors"):
            sync(path)
        self.rest = {"rest": formats}
        self.journal.add(self.rest)

    def write_experts(self) -> None:
        """Write the layers that are not there."""
        total = sum(layer.nbytes for layer in self.plan.layers)
        before = sum(entry["nbytes"] for entry in self.done.values())
        self.report("experts", before, total)
        for layer in self.plan.layers:
            if layer.file not in self.done:
                self._write_layer(layer, partial(self._tell, before, total))
                before += layer.nbytes

    def _tell(self, before: int, total: int, done: int) -> None:
        self.report("experts", before + done, total)

    def _write_layer(self, layer: Layer, advance: Callable[[int], None]) -> None:
        path = self.experts / layer.file
        unfinished = path.with_name(path.name + PARTIAL)
        sums = write_file(unfinished, self.plan, layer, advance)
        os.rename(unfinished, path)
        sync(self.experts)
        form = write_format(layer.like)
        entry = {"file": layer.file, "nbytes": layer.nbytes, "form": form, "crc32": sums.tolist()}
        self.journal.add(entry)
        self.done[layer.file] = entry

    def write_manifest(self, checkpoint: Checkpoint) -> None:
        """Write what says where everything is, and the model's config."""
        assert self.rest is not None
        forms: list[dict[str, Any]] = []
        entries = []
        formats = dict(self.rest["rest"])
        for layer in self.plan.layers:
            entry = self.done[layer.file]
            if entry["form"] not in forms:
                forms.append(entry["form"])
            sums = np.array(entry["crc32"], np.uint32)
            entries.append(write_layer(layer.module, layer.file, forms.index(entry["form"]), sums))
            for kind, matrix in layer.like.items():
                name = f"{self.plan.prefix}{layer.home}.{kind}_proj"
                formats[name] = {"group_size": matrix.group, "bits": matrix.bits, "mode": matrix.kind}
        first = self.plan.layers[0]
        inner, hidden = first.like["up"].shape
        config = mlx_config(checkpoint.config, formats)
        found = {
            "format": expert_files.NAME,
            "version": expert_files.VERSION,
            "model_type": config["model_type"],
            "source": self.journal.head["source"],
            "count": first.count,
            "hidden": hidden,
            "inner": inner,
            "lanes": self.plan.lanes,
            "nbytes": sum(layer.nbytes for layer in self.plan.layers),
            "formats": forms,
            "layers": entries,
        }
        _write_json(self.folder / "config.json", config)
        _write_json(self.experts / expert_files.MANIFEST, found)


def _write_json(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1))
    sync(path)
