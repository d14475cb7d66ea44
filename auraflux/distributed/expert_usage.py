"""Expert usage files: how often each expert was chosen, for the placement of experts on the next start."""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from auraflux.errors import FormatError, InputError
from auraflux.machine import cache_folder
from auraflux.weights.formats.untrusted import named, read_json

log = logging.getLogger("auraflux")

OFF, AUTO = "off", "auto"
FORMAT, VERSION = "auraflux expert use", 1
MAX_COUNT = 1 << 40  # of one expert; sums fit into 64 bits

ExpertUsage = dict[str, list[int]]


def model_name(identity: Mapping[str, Any]) -> str:
    """Return a name of a model that depends on its files, not on their folder."""
    return hashlib.sha256(json.dumps(identity["files"], sort_keys=True).encode()).hexdigest()[:32]


def usage_path(model: str) -> Path:
    """Return the path of the usage file of a model in the cache folder."""
    return cache_folder() / "experts" / f"{model}.json"


def find_usage(option: str, model: str) -> ExpertUsage:
    """Load the expert usage: none for "off", the saved one for "auto", or that of a file."""
    if option == OFF:
        return {}
    path = usage_path(model) if option == AUTO else Path(option)
    if option == AUTO and not path.is_file():
        return {}
    try:
        return read(path, model)
    except (FormatError, InputError) as err:
        if option != AUTO:
            raise
        log.warning("experts are placed by number: %s", err)
        return {}


def read(path: Path, model: str) -> ExpertUsage:
    """Read the usage file of a model; refuse other files."""
    found = read_json(path)
    if (found.get("format"), found.get("version")) != (FORMAT, VERSION):
        raise FormatError(f"{named(path)} is not an expert usage file of version {VERSION}.")
    if found.get("model") != model:
        raise InputError(f"{named(path)} holds the expert usage of another model.")
    layers = found.get("layers")
    if not isinstance(layers, dict) or not all(_counts(uses) for uses in layers.values()):
        raise FormatError(f"{named(path)} must hold a list of counts for every layer, integers from 0.")
    return layers


def _counts(uses: Any) -> bool:
    return isinstance(uses, list) and all(type(count) is int and 0 <= count < MAX_COUNT for count in uses)


def save(path: Path, model: str, uses: ExpertUsage) -> None:
    """Write a usage file atomically; log a failure."""
    content = json.dumps({"format": FORMAT, "version": VERSION, "model": model, "layers": uses})
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished.write_text(content)
        unfinished.replace(path)
    except OSError as err:
        log.warning("expert usage was not saved: %s", err.strerror or err)
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
