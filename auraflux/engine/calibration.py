"""Key calibrations of models: read from a given file, from this package for the built-in model, from the cache of earlier
calibrations, or measured now.

A cached file is identified by a hash of sampled weights, a few rows of each attention layer's projections, not by the model's
path. It holds only tensors, and its digest is checked.
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
from auraflux.cache.key_calibration import KeyCalibration, ModelCalibration
from auraflux.engine.calibrate import DEFAULT_TOKENS, FEW_TOKENS, RECIPE, calibrate_keys, random_tokens
from auraflux.errors import FormatError, InputError, SettingsError
from auraflux.machine import cache_folder
from auraflux.progress import Report
from auraflux.weights.fingerprint import fingerprint
from auraflux.weights.formats.untrusted import brief, named, regular_file

log = logging.getLogger("auraflux")

OFF, AUTO = "off", "auto"
FORMAT, VERSION = "auraflux calibration", 1
MODEL_FILE = "keys.calibration"  # in a model's folder
INCLUDED = Path(__file__).parent / "calibrations"  # of built-in models, under the names of cached ones
ENDING, UNFINISHED = ".calibration", ".part"
UNFINISHED_S = 600.0  # after which a partial file is abandoned
LARGE_NBYTES = 4 << 30  # weights from which a CPU runs fewer tokens: more would take minutes


class CalibrationRanks(Protocol):
    """The ranks of a model, each with some of its layers or heads."""

    def sliced(self, shapes: list[Any]) -> list[Any]:
        """Return the cache shapes of this rank."""

    def gather(self, mine: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in their order."""

    def broadcast_tokens(self, tokens: list[int]) -> None:
        """Have all ranks run these tokens."""

    def merge(self, mine: ModelCalibration) -> ModelCalibration:
        """Return the calibration of all ranks' layers and heads."""


class SingleRank:
    """A single process with all layers."""

    def sliced(self, shapes: list[Any]) -> list[Any]:
        return shapes

    def gather(self, mine: bytes) -> list[bytes]:
        return [mine]

    def broadcast_tokens(self, tokens: list[int]) -> None:
        pass

    def merge(self, mine: ModelCalibration) -> ModelCalibration:
        return mine


def folder() -> Path:
    """Return the folder of cached calibrations."""
    return cache_folder() / "calibration"


def check(calibrate: str | Path) -> None:
    """Raise if the given calibration file cannot be read; called before the model loads."""
    if calibrate not in (OFF, AUTO):
        regular_file(Path(calibrate))


def for_second_model(calibrate: str | Path) -> str:
    """Return the calibration mode of a draft model: a given file belongs to the main model."""
    return OFF if calibrate == OFF else AUTO


def is_needed(calibrate: str | Path, shapes: list[Any], settings: CacheSettings) -> bool:
    """Return whether a layer quantizes its keys and calibration is on."""
    plan = zip(shapes, settings.plan(shapes), strict=True)
    return calibrate != OFF and any(bits is not None and type(shape) is AttentionShape for shape, bits in plan)


def calibration_tokens(nbytes: int, device: Any, streamed: bool) -> int:
    """Return how many tokens to run: fewer for large models on a CPU and for offloaded experts."""
    return FEW_TOKENS if streamed or (device.type == "cpu" and nbytes > LARGE_NBYTES) else DEFAULT_TOKENS


def load_or_calibrate(
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
    ranks: CalibrationRanks | None = None,
    ahead: bool = False,
) -> ModelCalibration:
    """Return the calibration of a file, or with "auto" a cached or included one, or else measure and cache it.

    path    of the model
    count   tokens to run
    nbytes  of its weights, for the progress report
    ranks   that share the model; None for a single process
    ahead   see `calibrate_keys`
    """
    ranks = ranks or SingleRank()
    name = weights_digest(ranks.gather(sample_weights(model, shapes)))
    if calibrate != AUTO:
        return read(Path(calibrate), shapes, name)
    cached = folder() / f"{hashlib.sha256(repr((name, RECIPE, count)).encode()).hexdigest()[:32]}{ENDING}"
    facts = {"weights": name, "model": fingerprint(path), "recipe": RECIPE, "tokens": count}
    for file in (path / MODEL_FILE, cached, INCLUDED / cached.name):
        if file.is_file():
            try:
                found = read(file, shapes, name)
            except (FormatError, InputError) as err:
                log.warning("keys are calibrated again: %s", err)
                continue
            if file.parent == INCLUDED:
                _cache(cached, found, facts)
            return found
    vocab = model.config.vocab if tokenizer is None else min(model.config.vocab, tokenizer.vocab_size)
    tokens = random_tokens(count, vocab, () if tokenizer is None else sorted(tokenizer.special_ids))
    ranks.broadcast_tokens(tokens)
    here = ranks.sliced(shapes)

    def progress(layers: int, total: int) -> None:
        report("calibrating", nbytes * layers // total, nbytes)

    found = calibrate_keys(model, here, tokens, dtype, device, progress, ahead)
    found = ranks.merge(found)
    if (failure := _cache(cached, found, facts)) is not None:
        log.warning("the key calibration was not cached, so every run repeats it: %s", failure)
    return found


def sample_weights(model: Any, shapes: list[Any]) -> bytes:
    """Return sampled weights of a model's local layers."""
    found = bytearray()
    # layers after the last shape share the KV of earlier layers
    for layer, number in zip(model.layers, model.span[: len(shapes)], strict=False):
        for tensor in layer.mixer.sample() if type(shapes[number]) is AttentionShape else ():
            found += repr((tuple(tensor.shape), str(tensor.dtype))).encode()
            found += tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()
    return bytes(found)


def weights_digest(sampled: list[bytes]) -> str:
    """Return a hash of sampled weights, which identifies a model."""
    return hashlib.sha256(b"".join(sampled)).hexdigest()[:32]


def read(path: Path, shapes: list[Any], weights: str) -> ModelCalibration:
    """Read the calibration of the model with these shapes and weights digest; raise if it is another's or corrupt."""
    file = regular_file(path)
    try:
        with safe_open(str(file), "pt") as content:
            about = _about(content)
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
            layers = {int(n): KeyCalibration(**_part(tensors, n), interleaved=bool(x)) for n, x in about["layers"].items()}
            owner, digest = about["weights"], about["digest"]
    # torch has a RuntimeError for a file that cannot be opened
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise FormatError(f"{named(path)} is not a calibration: {brief(err)}.") from err
    found = ModelCalibration(layers)
    if owner != weights:
        raise InputError(f"{named(path)} is the calibration of another model or of other weights.")
    for number, shape in enumerate(shapes):
        if type(shape) is AttentionShape:
            found.for_layer(number, shape.heads, shape.width)
    if found.digest != digest:
        raise FormatError(f"{named(path)} is corrupt: the digest of its contents does not match.")
    return found


def _part(tensors: dict[str, Any], number: str) -> dict[str, Any]:
    return {name: tensors[f"{number}.{name}"].float() for name in ("scale", "along", "across", "frequencies")}


def _about(content: Any) -> dict[str, Any]:
    about = json.loads((content.metadata() or {})["about"])
    if (about["format"], about["version"]) != (FORMAT, VERSION):
        raise ValueError("it has another format or version")
    return about


def _cache(path: Path, calibration: ModelCalibration, facts: dict[str, Any]) -> str | None:
    """Write a calibration to the cache; return why it could not be written."""
    try:
        _write(path, calibration, facts)
    except (OSError, MemoryError) as err:
        return getattr(err, "strerror", None) or str(err) or "there is no memory left"
    return None


def _write(path: Path, calibration: ModelCalibration, facts: dict[str, Any]) -> None:
    """Write a file atomically."""
    layers = {str(number): layer.interleaved for number, layer in calibration.layers.items()}
    about = {"format": FORMAT, "version": VERSION, "digest": calibration.digest, "layers": layers, **facts}
    tensors = {
        f"{number}.{name}": tensor.cpu().contiguous()
        for number, layer in calibration.layers.items()
        for name, tensor in layer.tensors.items()
    }
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_unfinished(path.parent)
    # another process may write the same file
    unfinished = path.with_suffix(f".{os.getpid()}{UNFINISHED}")
    try:
        unfinished.write_bytes(save(tensors, {"about": json.dumps(about)}))
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def _remove_unfinished(folder: Path) -> None:
    """Remove partial files of killed processes."""
    for path in folder.glob(f"*{UNFINISHED}"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > UNFINISHED_S:
                path.unlink()


def copy_into(path: Path, folder: Path) -> None:
    """Copy the cached calibration of a model into a folder that has the same attention weights."""
    cached = find_cached(path)
    if cached is not None:
        shutil.copyfile(cached["file"], folder / MODEL_FILE)


def find_cached(path: Path) -> dict[str, Any] | None:
    """Return the file, digest and token count of a model's cached calibration; None if there is none."""
    wanted = fingerprint(path)
    try:
        files = [path / MODEL_FILE, *sorted(folder().glob(f"*{ENDING}"))]
    except (OSError, SettingsError):
        return None
    for file in files:
        try:
            with safe_open(str(regular_file(file)), "pt") as content:
                about = _about(content)
            if file.name == MODEL_FILE or (about["model"], about["recipe"]) == (wanted, RECIPE):
                return {"file": str(file), "digest": about["digest"], "tokens": about["tokens"]}
        except (FormatError, SafetensorError, OSError, RuntimeError, ValueError, KeyError, TypeError):
            continue
    return None
