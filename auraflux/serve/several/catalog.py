"""`read_catalog`: the models of a server, from a TOML file or from a folder of models."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from auraflux.errors import AurafluxError, FormatError, InputError
from auraflux.serve.keep_alive import parse_keep_alive
from auraflux.weights.formats.model_files import SPLIT

FILE = "models.toml"
SERVER_KEYS = ("memory", "keep_alive", "load_timeout")
ENTRY_KEYS = ("path", "aliases", "pinned", "keep_alive")
NAME = re.compile(r"[\w][\w.@+:/-]{0,199}")
# parts of other models, not models
PROJECTORS = "mmproj"


@dataclass(frozen=True)
class Entry:
    """A model of the catalog.

    model         path, or name that can be downloaded
    aliases       other names in the API
    pinned        loaded at the start and never unloaded
    keep_alive_s  seconds that it stays loaded without requests; None for the server's default
    settings      options of `auraflux serve` for this model
    """

    name: str
    model: str
    aliases: tuple[str, ...] = ()
    pinned: bool = False
    keep_alive_s: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Catalog:
    """The models of a server.

    memory          for all loaded models, such as "12GB"; None for the default
    keep_alive_s    seconds that a model stays loaded without requests; None for the default
    load_timeout_s  seconds that a request waits for its model; None for the default
    """

    entries: tuple[Entry, ...]
    memory: str | None = None
    keep_alive_s: float | None = None
    load_timeout_s: float | None = None

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for entry in self.entries:
            for name in (entry.name, *entry.aliases):
                if name in seen:
                    raise InputError(f"two models have the name {name!r}: {seen[name]} and {entry.name}. Rename one.")
                seen[name] = entry.name


def is_models_folder(path: Path) -> bool:
    """Return whether a path is a folder of models rather than a model."""
    if not path.is_dir() or (path / "config.json").exists():
        return False
    return (path / FILE).is_file() or next(_models_in(path), None) is not None


def read_catalog(path: Path) -> Catalog:
    """Read a catalog: a TOML file, a folder with models.toml, or a folder of models."""
    if path.is_dir():
        if (path / FILE).is_file():
            return _read_file(path / FILE)
        entries = tuple(Entry(name, str(found)) for name, found in _models_in(path))
        if not entries:
            raise FormatError(f"{path} holds no models: no GGUF file, and no folder with config.json.")
        return Catalog(entries)
    if path.suffix.lower() == ".gguf":
        raise InputError(f"{path} is one model: serve it without --models, or give the folder that holds it.")
    return _read_file(path)


def _models_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names and paths of the models in a folder and in its subfolders."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if (path / "config.json").exists():
                yield path.name, path
                continue
            for config in sorted(path.glob("*/config.json")):
                yield f"{path.name}/{config.parent.name}", config.parent
            for file in sorted(path.glob("*.gguf")):
                yield from ((f"{path.name}/{name}", file) for name in _gguf_name(file))
        elif path.suffix.lower() == ".gguf":
            yield from ((name, path) for name in _gguf_name(path))


def _gguf_name(path: Path) -> Iterator[str]:
    """Yield the name of a GGUF file; none for later parts of a split model and for projectors of images."""
    split = SPLIT.fullmatch(path.name)
    if path.name.lower().startswith(PROJECTORS) or (split is not None and int(split[2]) != 1):
        return
    yield path.stem if split is None else split[1]


def _read_file(path: Path) -> Catalog:
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise InputError(f"the models in {path} cannot be read: {getattr(err, 'strerror', None) or err}.") from err
    models = found.pop("models", None)
    if not isinstance(models, dict) or not models:
        raise InputError(f"{path} lists no models. Write a table for each, such as [models.small] with path = 'small.gguf'.")
    _refuse_unknown(found, SERVER_KEYS, str(path))
    entries = tuple(_entry(name, about, path) for name, about in models.items())
    seconds, memory = found.get("load_timeout"), found.get("memory")
    if seconds is not None and not (type(seconds) in (int, float) and 0 < seconds < 1e6):
        raise InputError(f"{path}: load_timeout is {seconds!r:.80}; give seconds, such as 120.")
    keep_alive = _keep_alive(found.get("keep_alive"), str(path))
    return Catalog(entries, None if memory is None else str(memory), keep_alive, seconds)


def _entry(name: str, about: Any, path: Path) -> Entry:
    where = f"{path}: models.{name}"
    if not NAME.fullmatch(name):
        raise InputError(f"{path}: {name!r:.80} is no name for a model; use letters, digits and . _ - + @ : /")
    if not isinstance(about, dict):
        raise InputError(f"{where} is {about!r:.80}; write a table, [models.{name}] with path = 'model.gguf'.")
    model, aliases, pinned = about.get("path"), about.get("aliases", []), about.get("pinned", False)
    if not isinstance(model, str) or not model:
        raise InputError(f"{where} has no path: give a folder, a GGUF file, or a name on the Hugging Face hub.")
    if not isinstance(aliases, list) or not all(isinstance(each, str) and NAME.fullmatch(each) for each in aliases):
        raise InputError(f"{where}: aliases is {aliases!r:.80}; give a list of names, such as ['gpt-4o'].")
    if type(pinned) is not bool:
        raise InputError(f"{where}: pinned is {pinned!r:.80}; give true or false.")
    settings = {key: value for key, value in about.items() if key not in ENTRY_KEYS}
    relative = path.parent / Path(model).expanduser()
    located = str(relative) if relative.exists() else model
    return Entry(name, located, tuple(aliases), pinned, _keep_alive(about.get("keep_alive"), where), settings)


def _keep_alive(given: Any, where: str) -> float | None:
    if given is not None and type(given) not in (int, float, str):
        raise InputError(f"{where}: keep_alive is {given!r:.80}; give seconds, or a duration such as '5m'.")
    try:
        return parse_keep_alive(given)
    except AurafluxError as err:
        raise InputError(f"{where}: {err}") from err


def _refuse_unknown(found: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise InputError(f"{where} has {', '.join(unknown)[:200]}; it may have {', '.join(known)}, and tables [models.NAME].")
