"""Mutations of files that this package itself writes: calibrations, prefix cache entries, packed experts, journals."""

import json
import random
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from auraflux.bench.distributed.forecast import weights_of
from auraflux.cache import AttentionShape
from auraflux.cache.key_calibration import KeyCalibration, ModelCalibration
from auraflux.cache.kv_sequence import Snapshot
from auraflux.cache.layers.recurrent import StateImage
from auraflux.cache.pages import PageImage
from auraflux.cache.prefix.disk import PrefixDisk
from auraflux.engine import calibration
from auraflux.eval.state import State
from auraflux.models import family
from auraflux.weights.convert.journal import NAME as JOURNAL
from auraflux.weights.convert.journal import Journal
from auraflux.weights.download import checksums
from auraflux.weights.experts.packed_files import FOLDER, MANIFEST
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.fuzz.corpus import SCRATCH, join, load_all, packed_model, split
from tests.fuzz.harness import Target
from tests.fuzz.mutate import mutated, mutated_bytes, mutated_json

SHAPES: list[Any] = [AttentionShape(2, 64)]
MIXER = SimpleNamespace(sample=lambda: [torch.zeros(2, 64)])
LAYERED = SimpleNamespace(layers=[SimpleNamespace(mixer=MIXER)], span=range(1))
FORMAT, TOKENS = "toy", [1, 2, 3, 4]


def odd_tensors(rng: random.Random, content: bytes) -> bytes:
    """Return a safetensors file with a mutated header, metadata or data."""
    data, header = split(content)
    how = rng.random()
    if how < 0.5:
        about = mutated(rng, json.loads(header["__metadata__"]["about"]))
        header["__metadata__"]["about"] = mutated_json(rng, about).decode(errors="replace")
    elif how < 0.8:
        header = mutated(rng, header)
    else:
        return mutated_bytes(rng, content)
    return join(data, mutated_json(rng, header))


@cache
def weights_digest() -> str:
    return calibration.weights_digest([calibration.sample_weights(LAYERED, SHAPES)])


@cache
def calibrated() -> bytes:
    path = SCRATCH / "original.calibration"
    vectors = ModelCalibration({0: KeyCalibration(*(torch.full((2, 64), 1.5) for _ in range(3)), torch.ones(32))})
    calibration._write(path, vectors, {"weights": weights_digest(), "model": "x", "recipe": 1, "tokens": 128})
    return path.read_bytes()


def calibrations(rng: random.Random) -> None:
    """Load a mutated calibration file, which equals the original or is refused."""
    path = SCRATCH / "changed.calibration"
    path.write_bytes(odd_tensors(rng, calibrated()))
    found = calibration.read(path, SHAPES, weights_digest())
    found.for_layer(0, 2, 64)


@cache
def prefix() -> tuple[str, bytes]:
    folder = SCRATCH / "prefixes"
    disk = PrefixDisk(folder, 1 << 20, FORMAT)
    images = PageImage(0, [torch.ones(4, 8)]), StateImage([torch.ones(3)])
    disk.save(TOKENS, Snapshot(FORMAT, len(TOKENS), images))
    disk.wait()
    (path,) = folder.iterdir()
    return path.name, path.read_bytes()


def prefixes(rng: random.Random) -> None:
    """Load a mutated prefix cache entry, which equals the original or is dropped."""
    (name, content), folder = prefix(), SCRATCH / "changed-prefixes"
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(odd_tensors(rng, content))
    disk = PrefixDisk(folder, 1 << 20, FORMAT)
    saved, _ = disk.find([*TOKENS, 9], True)
    if saved is not None and (snapshot := disk.load(saved).result()) is not None:
        assert all(isinstance(tensor, torch.Tensor) for image in snapshot.images for tensor in image.tensors)
    disk._writer.shutdown()


@cache
def manifest() -> dict[str, Any]:
    return json.loads((packed_model() / FOLDER / MANIFEST).read_bytes())


def experts(rng: random.Random) -> None:
    """Load a packed model with a mutated manifest or expert file."""
    folder = packed_model() / FOLDER
    manifest()
    path = rng.choice(sorted(folder.glob("*.bin")))
    content = path.read_bytes()
    try:
        if rng.random() < 0.8:
            (folder / MANIFEST).write_bytes(mutated_json(rng, mutated(rng, manifest())))
        else:
            path.write_bytes(mutated_bytes(rng, content, 2))
        checkpoint = open_checkpoint(packed_model())
        weights_of(checkpoint, family(checkpoint.config))
        load_all(packed_model())
    finally:
        path.write_bytes(content)
        (folder / MANIFEST).write_text(json.dumps(manifest()))


def notes(rng: random.Random) -> None:
    """Read a mutated journal of an interrupted run, or a mutated record of a verified file."""
    records: list[Any] = [{"setting": "k8v4", "task": "copy", "result": {"loss": [1.5]}}, {"source": "a", "stamps": [1]}]
    content = b"".join(mutated_json(rng, mutated(rng, record, 2)) + b"\n" for record in records * 2)
    path = SCRATCH / "notes" / "eval.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(mutated_bytes(rng, content, 2) if rng.random() < 0.2 else content)
    state = State(path)
    state.add("k4v4", "copy", 1)
    state.close()
    _note_of(rng)
    _journal(rng, content)


def _note_of(rng: random.Random) -> None:
    path = SCRATCH / "fetched"
    path.write_bytes(b"fetched")
    checksums._record_path(path).write_bytes(mutated_json(rng, mutated(rng, checksums._stat_record(path, "x"))))
    assert isinstance(checksums.is_verified(path, "x"), bool)


def _journal(rng: random.Random, content: bytes) -> None:
    """Read a mutated journal, or random bytes in its place."""
    folder, head = SCRATCH / "journal", {"source": "a", "stamps": [1]}
    folder.mkdir(exist_ok=True)
    if rng.random() < 0.7:
        (folder / JOURNAL).write_bytes(b"")
        journal = Journal(folder, head)
        journal.add({"file": "layer_000.bin", "nbytes": 1})
        journal.close()
        content = mutated_bytes(rng, (folder / JOURNAL).read_bytes(), 2)
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
