"""Where the vectors of a model's keys come from: a file that was named, one made before, or a run of the model.

A file is found again by what the weights are, not by where they lie: a few rows of each attention layer's projections tell
them from others. It holds tensors and nothing that is run; what is not as it was written is not used.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from auraflux.cache import AttentionShape, CacheSettings
from auraflux.cache.calibration import LayerVectors, ModelVectors
from auraflux.errors import FormatError, InputError, SettingsError
from auraflux.machine import cache_folder
from auraflux.run.calibrate import FEW, RECIPE, TOKENS, find_vectors, random_tokens
from auraflux.run.progress import Report
from auraflux.weights.boundary import brief, named, regular
from auraflux.weights.fingerprint import fingerprint

log = logging.getLogger("auraflux")

OFF, AUTO = "off", "auto"
FORMAT, VERSION = "auraflux calibration", 1
CARRIED = "keys.calibration"  # the name of a file that a model's folder may have
ENDING, UNFINISHED = ".calibration", ".part"
UNFINISHED_S = 600.0  # after which nobody writes a file any more
HEAVY = 4 << 30  # bytes of weights from which a CPU runs few tokens: more would take minutes


class Others(Protocol):
    """Ranks that have the rest of a model's layers, or of its heads."""

    def sliced(self, shapes: list[Any]) -> list[Any]:
        """The shapes of what is here."""

    def gather(self, mine: bytes) -> list[bytes]:
        """What all have, in their order."""

    def begin(self, tokens: list[int]) -> None:
        """Let all run tokens at the same time."""

    def join(self, mine: ModelVectors) -> ModelVectors:
        """What all have found."""


class Alone:
    """One process that has all layers: there are no others to ask."""

    def sliced(self, shapes: list[Any]) -> list[Any]:
        return shapes

    def gather(self, mine: bytes) -> list[bytes]:
        return [mine]

    def begin(self, tokens: list[int]) -> None:
        pass

    def join(self, mine: ModelVectors) -> ModelVectors:
        return mine


def folder() -> Path:
    """Where files are kept that can be made again."""
    return cache_folder() / "calibration"


def check(calibrate: str | Path) -> None:
    """Refuse a file that cannot be read, before anything is loaded."""
    if calibrate not in (OFF, AUTO):
        regular(Path(calibrate))


def for_another(calibrate: str | Path) -> str:
    """What a second model is calibrated by: a file is of one model."""
    return OFF if calibrate == OFF else AUTO


def is_wanted(calibrate: str | Path, shapes: list[Any], settings: CacheSettings) -> bool:
    """Whether keys of some layer are coded, and vectors for them asked for."""
    plan = zip(shapes, settings.plan(shapes), strict=True)
    return calibrate != OFF and any(bits is not None and type(shape) is AttentionShape for shape, bits in plan)


def enough_tokens(nbytes: int, device: Any, streamed: bool) -> int:
    """How many tokens are run: fewer where weights are many, or read from disk as they are chosen."""
    return FEW if streamed or (device.type == "cpu" and nbytes > HEAVY) else TOKENS


def vectors_for(
    calibrate: str | Path,
    model: Any,
    shapes: list[Any],
    path: Path,
    tokenizer: Any | None,
    count: int,
    *,
    dtype: Any,
    device: Any,
    nbytes: int = 1,
    report: Report = lambda what, done, total: None,
    others: Others | None = None,
) -> ModelVectors:
    """Give the vectors of a model: those of a file, or "auto": kept ones, or new ones, which are then kept.

    path    of the model
    count   of tokens that are run
    nbytes  of its weights, for the report
    others  who have some of its layers; None where all are here
    """
    others = others or Alone()
    name = weights_name(others.gather(samples(model, shapes)))
    if calibrate != AUTO:
        return read(Path(calibrate), shapes, name)
    kept = folder() / f"{hashlib.sha256(repr((name, RECIPE, count)).encode()).hexdigest()[:32]}{ENDING}"
    for file in (path / CARRIED, kept):
        if file.is_file():
            try:
                return read(file, shapes, name)
            except (FormatError, InputError) as err:
                log.warning("keys are calibrated anew: %s", err)
    vocab = model.config.vocab if tokenizer is None else min(model.config.vocab, tokenizer.vocab_size)
    tokens = random_tokens(count, vocab, () if tokenizer is None else sorted(tokenizer.special_ids))
    others.begin(tokens)
    here = others.sliced(shapes)
    found = find_vectors(model, here, tokens, dtype, device, lambda a, b: report("calibrating", nbytes * a // b, nbytes))
    found = others.join(found)
    try:
        _keep(kept, found, {"weights": name, "model": fingerprint(path), "recipe": RECIPE, "tokens": count})
    except (OSError, MemoryError) as err:
        said = getattr(err, "strerror", None) or err
        log.warning("the calibration of keys was not kept, so every run makes it anew: %s", said or "there is no memory left")
    return found


def samples(model: Any, shapes: list[Any]) -> bytes:
    """A few of a model's weights, or of those of its layers that are here."""
    found = bytearray()
    # layers after the last shape keep nothing of their own
    for layer, number in zip(model.layers, model.span[: len(shapes)], strict=False):
        for tensor in layer.mixer.sample() if type(shapes[number]) is AttentionShape else ():
            found += repr((tuple(tensor.shape), str(tensor.dtype))).encode()
            found += tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()
    return bytes(found)


def weights_name(sampled: list[bytes]) -> str:
    """A name for a model's weights, by a few of them."""
    return hashlib.sha256(b"".join(sampled)).hexdigest()[:32]


def read(path: Path, shapes: list[Any], weights: str) -> ModelVectors:
    """Read the vectors of a model whose layers and weights are these; refuse whatever is not them."""
    file = regular(path)
    try:
        with safe_open(str(file), "pt") as content:
            about = _about(content)
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
            layers = {int(n): LayerVectors(**_part(tensors, n), interleaved=bool(x)) for n, x in about["layers"].items()}
            owner, digest = about["weights"], about["digest"]
    # torch has a RuntimeError for a file that cannot be opened
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise FormatError(f"{named(path)} is no calibration: {brief(err)}.") from err
    found = ModelVectors(layers)
    if owner != weights:
        raise InputError(f"{named(path)} is the calibration of another model, or of other weights.")
    for number, shape in enumerate(shapes):
        if type(shape) is AttentionShape:
            found.of(number, shape.heads, shape.width)
    if found.digest != digest:
        raise FormatError(f"{named(path)} is not what was written: its contents do not have the sum that they should.")
    return found


def _part(tensors: dict[str, Any], number: str) -> dict[str, Any]:
    return {name: tensors[f"{number}.{name}"].float() for name in ("scale", "along", "across", "frequencies")}


def _about(content: Any) -> dict[str, Any]:
    about = json.loads((content.metadata() or {})["about"])
    if (about["format"], about["version"]) != (FORMAT, VERSION):
        raise ValueError("it is of another kind or version")
    return about


def _keep(path: Path, vectors: ModelVectors, facts: dict[str, Any]) -> None:
    """Write a file, whole or not at all."""
    layers = {str(number): layer.interleaved for number, layer in vectors.layers.items()}
    about = {"format": FORMAT, "version": VERSION, "digest": vectors.digest, "layers": layers, **facts}
    tensors = {
        f"{number}.{name}": tensor.cpu().contiguous()
        for number, layer in vectors.layers.items()
        for name, tensor in layer.tensors.items()
    }
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_unfinished(path.parent)
    # another process may be writing the same
    unfinished = path.with_suffix(f".{os.getpid()}{UNFINISHED}")
    try:
        unfinished.write_bytes(save(tensors, {"about": json.dumps(about)}))
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def _remove_unfinished(folder: Path) -> None:
    """Clear what runs that were killed have left."""
    for path in folder.glob(f"*{UNFINISHED}"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > UNFINISHED_S:
                path.unlink()


def carry(path: Path, folder: Path) -> None:
    """Put what is kept for the model of a path into a folder with the same attention, so that nobody makes it again."""
    kept = kept_for(path)
    if kept is not None:
        shutil.copyfile(kept["file"], folder / CARRIED)


def kept_for(path: Path) -> dict[str, Any] | None:
    """What is kept for the model of a path as it is now: its file, digest and number of tokens; None if nothing is."""
    wanted = fingerprint(path)
    try:
        files = [path / CARRIED, *sorted(folder().glob(f"*{ENDING}"))]
    except (OSError, SettingsError):
        return None
    for file in files:
        try:
            with safe_open(str(regular(file)), "pt") as content:
                about = _about(content)
            if file.name == CARRIED or (about["model"], about["recipe"]) == (wanted, RECIPE):
                return {"file": str(file), "digest": about["digest"], "tokens": about["tokens"]}
        except (FormatError, SafetensorError, OSError, RuntimeError, ValueError, KeyError, TypeError):
            continue
    return None
