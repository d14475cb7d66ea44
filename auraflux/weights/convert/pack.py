"""`pack`: writes a model so that single experts can be read from disk, see `experts/packed_files.py` for the layout.

A packed folder is what `convert` writes, with the experts in separate files. It is written as `<name>.partial` and renamed when
complete. A journal in it lists the complete files, so that an interrupted run can resume.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from auraflux.errors import FormatError
from auraflux.quant import check_format
from auraflux.weights.convert.destination import put_in_place, working_folder
from auraflux.weights.convert.expert_packer import ExpertPacker, Layer, write_file
from auraflux.weights.convert.journal import NAME, Journal, digest, discard, stamps
from auraflux.weights.convert.mlx_folder import (
    Family,
    Shards,
    check_paths,
    copy_others,
    copy_tower,
    find_mtp_prefixes,
    mlx_config,
)
from auraflux.weights.experts import packed_files
from auraflux.weights.experts.packed_files import write_format, write_layer
from auraflux.weights.experts.page_cache import fsync_path
from auraflux.weights.formats.stored import Checkpoint

SHARD_NBYTES = 1 << 28  # of the other weights, buffered in memory
PARTIAL = ".partial"

Report = Callable[[str, int, int], None]  # phase, bytes so far, total bytes


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
    tower: Sequence[str] = (),
) -> Path:
    """Write a checkpoint as a packed folder, or resume an interrupted run.

    lanes   interleaved rows: `ISA.lanes` for the CPU kernels, 1 for a GPU
    bits    quantization, see `convert`; None preserves the checkpoint's formats
    force   replace an existing model folder, and discard an interrupted run
    report  called with the phase, bytes so far and total bytes
    add     writes further files to the folder, such as a tokenizer
    tower   names of a vision tower's tensors, which are copied
    """
    if bits is not None:
        check_format(bits, group)
    target = target.absolute()
    _check_target(checkpoint, target, force)
    options: dict[str, Any] = {"bits": bits, "group": group, "lanes": lanes}
    config = family.Config.from_hf(checkpoint.config)
    mtp_prefixes = find_mtp_prefixes(checkpoint, family, config)
    plan = ExpertPacker(checkpoint, family.rename, None, **options, mtp_prefixes=mtp_prefixes)
    family.Model(config, plan)
    plan.check_loaded()
    if not plan.layers:
        raise FormatError(f"{checkpoint.path} has no experts, so there is nothing to pack.")
    folder = target.with_name(target.name + PARTIAL)
    try:
        if force:
            discard(folder)
        files = checkpoint.files()
        head = {"version": packed_files.VERSION, "source": digest(files), "stamps": stamps(files), **options}
        journal = Journal(folder, head)
        try:
            run = _Run(folder, plan, journal, report, tower)
            run.check_disk_space()
            wanted = {**options, "mtp_prefixes": mtp_prefixes}
            run.write_rest(lambda shards, advance: _construct(family, config, checkpoint, shards, advance, wanted))
            run.write_experts()
            run.write_manifest(checkpoint)
            copy_others(checkpoint.path, folder)
            add(folder)
            _finish(folder, target, lambda: check_paths(checkpoint, target, force))
        finally:
            journal.close()
    except OSError as err:
        resume = f" Progress is saved in {folder}; run the same command to resume." if folder.exists() else ""
        raise FormatError(f"{target} cannot be written: {err.strerror or err}.{resume}") from err
    return target


def _check_target(checkpoint: Checkpoint, target: Path, force: bool) -> None:
    """Raise if the target cannot be written; finish a run that was interrupted in its last step."""
    try:
        with working_folder(target):
            if (target / packed_files.FOLDER / packed_files.MANIFEST).exists():
                (target / NAME).unlink(missing_ok=True)
            check_paths(checkpoint, target, force)
    except OSError as err:
        raise FormatError(f"{target} cannot be written: {err.strerror or err}.") from err


def _construct(
    family: Family, config: Any, checkpoint: Checkpoint, shards: Shards, advance: Callable[[int], None], options: dict[str, Any]
) -> dict[str, Any]:
    weights = ExpertPacker(checkpoint, family.rename, shards, **options, advance=advance)
    family.Model(config, weights)
    return weights.formats


def _finish(folder: Path, target: Path, check: Callable[[], None]) -> None:
    """Rename a complete folder to the target."""
    fsync_path(folder)
    with working_folder(target) as aside:
        put_in_place(folder, target, aside, check)
        (target / NAME).unlink()
        fsync_path(target)
        fsync_path(target.parent)


class _Run:
    """State of one run of `pack`."""

    def __init__(self, folder: Path, plan: ExpertPacker, journal: Journal, report: Report, tower: Sequence[str]):
        self.folder, self.plan, self.journal, self.report, self.tower = folder, plan, journal, report, tower
        sizes = plan.checkpoint.sizes()
        self.tower_nbytes = sum(sizes[name] for name in tower)
        self.experts = folder / packed_files.FOLDER
        self.experts.mkdir(exist_ok=True)
        self.done = {entry["file"]: entry for entry in journal.entries if "file" in entry and self._is_complete(entry)}
        self.rest = next((entry for entry in journal.entries if "rest" in entry), None)

    def _is_complete(self, entry: dict[str, Any]) -> bool:
        path = self.experts / entry["file"]
        return path.exists() and path.stat().st_size == entry["nbytes"]

    def check_disk_space(self) -> None:
        """Raise if the disk has too little space."""
        needed = sum(layer.nbytes for layer in self.plan.layers if layer.file not in self.done)
        if self.rest is None:
            # dense weights have 16 bits or more
            needed += self.plan.rest_nbytes * (16 if self.plan.bits is None else self.plan.bits + 1) // 16
            needed += self.tower_nbytes
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise FormatError(
                f"{self.folder} needs {needed / 1e9:.2f} GB more, and its disk has {free / 1e9:.2f} GB left. "
                "Free some space, or name a folder on another disk."
            )

    def write_rest(self, construct: Callable[[Shards, Callable[[int], None]], dict[str, Any]]) -> None:
        """Write all weights except the experts."""
        if self.rest is not None:
            return
        # includes temporary files of safetensors from a killed run
        for path in self.folder.iterdir():
            if path.is_file() and path.name != NAME:
                path.unlink()
        shards, done, total = Shards(self.folder, SHARD_NBYTES), 0, self.plan.rest_nbytes + self.tower_nbytes

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            self.report("other weights", done, total)

        formats = construct(shards, advance)
        copy_tower(self.plan.checkpoint, self.tower, shards, advance)
        shards.close()
        for path in self.folder.glob("*.safetensors"):
            fsync_path(path)
        self.rest = {"rest": formats}
        self.journal.add(self.rest)

    def write_experts(self) -> None:
        """Write the experts of all incomplete layers."""
        total = sum(layer.nbytes for layer in self.plan.layers)
        before = sum(entry["nbytes"] for entry in self.done.values())
        self.report("experts", before, total)
        for layer in self.plan.layers:
            if layer.file not in self.done:
                self._write_layer(layer, partial(self._report_experts, before, total))
                before += layer.nbytes

    def _report_experts(self, before: int, total: int, done: int) -> None:
        self.report("experts", before + done, total)

    def _write_layer(self, layer: Layer, advance: Callable[[int], None]) -> None:
        path = self.experts / layer.file
        unfinished = path.with_name(path.name + PARTIAL)
        sums = write_file(unfinished, self.plan, layer, advance)
        os.rename(unfinished, path)
        fsync_path(self.experts)
        form = write_format(layer.like)
        entry = {"file": layer.file, "nbytes": layer.nbytes, "form": form, "crc32": sums.tolist()}
        self.journal.add(entry)
        self.done[layer.file] = entry

    def write_manifest(self, checkpoint: Checkpoint) -> None:
        """Write the manifest and the model's config."""
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
        config = mlx_config(checkpoint.config, formats, has_tower=bool(self.tower))
        found = {
            "format": packed_files.NAME,
            "version": packed_files.VERSION,
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
        _write_json(self.experts / packed_files.MANIFEST, found)


def _write_json(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1))
    fsync_path(path)
