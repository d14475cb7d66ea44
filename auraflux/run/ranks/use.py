"""How often a model's experts are chosen, as a file: what ranks counted while they ran, for those that divide it next time."""

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
from auraflux.weights.boundary import named, read_json

log = logging.getLogger("auraflux")

OFF, AUTO = "off", "auto"
FORMAT, VERSION = "auraflux expert use", 1
MOST = 1 << 40  # of one expert; sums of them stay whole

Uses = dict[str, list[int]]


def model_name(identity: Mapping[str, Any]) -> str:
    """A name for a model by its files, wherever they lie."""
    return hashlib.sha256(json.dumps(identity["files"], sort_keys=True).encode()).hexdigest()[:32]


def kept_at(model: str) -> Path:
    """Where uses are kept that were counted here."""
    return cache_folder() / "experts" / f"{model}.json"


def find_uses(chosen: str, model: str) -> Uses:
    """The uses by which experts are dealt out: none for "off"; for "auto" those that are kept, if any; or a file's."""
    if chosen == OFF:
        return {}
    path = kept_at(model) if chosen == AUTO else Path(chosen)
    if chosen == AUTO and not path.is_file():
        return {}
    try:
        return read(path, model)
    except (FormatError, InputError) as err:
        if chosen != AUTO:
            raise
        log.warning("experts are dealt out by number: %s", err)
        return {}


def read(path: Path, model: str) -> Uses:
    """Read the uses of a model's experts; refuse whatever is not them."""
    found = read_json(path)
    if (found.get("format"), found.get("version")) != (FORMAT, VERSION):
        raise FormatError(f"{named(path)} does not tell how often experts are chosen: it is of another kind or version.")
    if found.get("model") != model:
        raise InputError(f"{named(path)} tells how often experts of another model are chosen.")
    layers = found.get("layers")
    if not isinstance(layers, dict) or not all(_counts(uses) for uses in layers.values()):
        raise FormatError(f"{named(path)} does not hold a list of counts for every layer, whole numbers from 0.")
    return layers


def _counts(uses: Any) -> bool:
    return isinstance(uses, list) and all(type(count) is int and 0 <= count < MOST for count in uses)


def keep(path: Path, model: str, uses: Uses) -> None:
    """Write a file, whole or not at all; a folder that cannot be written to is no reason to fail."""
    content = json.dumps({"format": FORMAT, "version": VERSION, "model": model, "layers": uses})
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished.write_text(content)
        unfinished.replace(path)
    except OSError as err:
        log.warning("how often experts are chosen was not kept: %s", err.strerror or err)
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
