"""What this package itself keeps on disk, changed by chance: calibrations, prefixes, packed experts, notes of runs."""

import json
import random
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from auraflux.bench.forecast import weights_of
from auraflux.cache import AttentionShape
from auraflux.cache.calibration import LayerVectors, ModelVectors
from auraflux.cache.pages import PageImage
from auraflux.cache.prefix_disk import PrefixDisk
from auraflux.cache.recurrent import StateImage
from auraflux.cache.sequence import Snapshot
from auraflux.eval.state import State
from auraflux.models import family
from auraflux.run import calibration
from auraflux.weights import verified
from auraflux.weights.checkpoint import open_checkpoint
from auraflux.weights.expert_files import FOLDER, MANIFEST
from auraflux.weights.journal import NAME as JOURNAL
from auraflux.weights.journal import Journal
from tests.fuzz.corpus import SCRATCH, join, load_all, packed_model, split
from tests.fuzz.harness import Target
from tests.fuzz.mutate import as_json, mutated, octets

SHAPES: list[Any] = [AttentionShape(2, 64)]
MIXER = SimpleNamespace(sample=lambda: [torch.zeros(2, 64)])
LAYERED = SimpleNamespace(layers=[SimpleNamespace(mixer=MIXER)], span=range(1))
FORMAT, TEXT = "toy", [1, 2, 3, 4]


def odd_tensors(rng: random.Random, content: bytes) -> bytes:
    """A safetensors file of which the header, what it says about itself, or some octets are others."""
    data, header = split(content)
    how = rng.random()
    if how < 0.5:
        about = mutated(rng, json.loads(header["__metadata__"]["about"]))
        header["__metadata__"]["about"] = as_json(rng, about).decode(errors="replace")
    elif how < 0.8:
        header = mutated(rng, header)
    else:
        return octets(rng, content)
    return join(data, as_json(rng, header))


@cache
def weights_name() -> str:
    return calibration.weights_name([calibration.samples(LAYERED, SHAPES)])


@cache
def calibrated() -> bytes:
    path = SCRATCH / "whole.calibration"
    vectors = ModelVectors({0: LayerVectors(*(torch.full((2, 64), 1.5) for _ in range(3)), torch.ones(32))})
    calibration._keep(path, vectors, {"weights": weights_name(), "model": "x", "recipe": 1, "tokens": 128})
    return path.read_bytes()


def calibrations(rng: random.Random) -> None:
    """A file of calibration is read as it was written, or refused."""
    path = SCRATCH / "changed.calibration"
    path.write_bytes(odd_tensors(rng, calibrated()))
    found = calibration.read(path, SHAPES, weights_name())
    found.of(0, 2, 64)


@cache
def prefix() -> tuple[str, bytes]:
    folder = SCRATCH / "prefixes"
    disk = PrefixDisk(folder, 1 << 20, FORMAT)
    images = PageImage(0, [torch.ones(4, 8)]), StateImage([torch.ones(3)])
    disk.save(TEXT, Snapshot(FORMAT, len(TEXT), images))
    disk.wait()
    (path,) = folder.iterdir()
    return path.name, path.read_bytes()


def prefixes(rng: random.Random) -> None:
    """A prefix on disk is what was written, or it is dropped."""
    (name, content), folder = prefix(), SCRATCH / "changed-prefixes"
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(odd_tensors(rng, content))
    disk = PrefixDisk(folder, 1 << 20, FORMAT)
    saved, _ = disk.find([*TEXT, 9], True)
    if saved is not None and (snapshot := disk.load(saved).result()) is not None:
        assert all(isinstance(tensor, torch.Tensor) for image in snapshot.images for tensor in image.tensors)
    disk._writer.shutdown()


@cache
def manifest() -> dict[str, Any]:
    return json.loads((packed_model() / FOLDER / MANIFEST).read_bytes())


def experts(rng: random.Random) -> None:
    """A packed model whose manifest says something else, or whose experts' files are others."""
    folder = packed_model() / FOLDER
    manifest()
    path = rng.choice(sorted(folder.glob("*.bin")))
    content = path.read_bytes()
    try:
        if rng.random() < 0.8:
            (folder / MANIFEST).write_bytes(as_json(rng, mutated(rng, manifest())))
        else:
            path.write_bytes(octets(rng, content, 2))
        checkpoint = open_checkpoint(packed_model())
        weights_of(checkpoint, family(checkpoint.config))
        load_all(packed_model())
    finally:
        path.write_bytes(content)
        (folder / MANIFEST).write_text(json.dumps(manifest()))


def notes(rng: random.Random) -> None:
    """What was noted of a run that was interrupted, or of a file that was checked."""
    records: list[Any] = [{"setting": "k8v4", "task": "copy", "result": {"loss": [1.5]}}, {"source": "a", "stamps": [1]}]
    content = b"".join(as_json(rng, mutated(rng, record, 2)) + b"\n" for record in records * 2)
    path = SCRATCH / "notes" / "eval.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(octets(rng, content, 2) if rng.random() < 0.2 else content)
    state = State(path)
    state.add("k4v4", "copy", 1)
    state.close()
    _note_of(rng)
    _journal(rng, content)


def _note_of(rng: random.Random) -> None:
    path = SCRATCH / "fetched"
    path.write_bytes(b"fetched")
    verified._note(path).write_bytes(as_json(rng, mutated(rng, verified._facts(path, "x"))))
    assert isinstance(verified.is_remembered(path, "x"), bool)


def _journal(rng: random.Random, content: bytes) -> None:
    """One that was written, and changed since; or one that never was."""
    folder, head = SCRATCH / "journal", {"source": "a", "stamps": [1]}
    folder.mkdir(exist_ok=True)
    if rng.random() < 0.7:
        (folder / JOURNAL).write_bytes(b"")
        journal = Journal(folder, head)
        journal.add({"file": "layer_000.bin", "nbytes": 1})
        journal.close()
        content = octets(rng, (folder / JOURNAL).read_bytes(), 2)
    (folder / JOURNAL).write_bytes(content)
    found = Journal(folder, head if rng.random() < 0.9 else {**head, "bits": 4})
    found.close()
    assert found.entries in ([], [{"file": "layer_000.bin", "nbytes": 1}])


TARGETS = [
    Target("calibration", calibrations, 60),
    Target("prefix", prefixes, 60),
    Target("experts", experts, 25),
    Target("notes", notes, 40),
]
