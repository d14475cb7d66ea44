"""`local_models`: the models that are downloaded, by the names that load them. Uses no network."""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from auraflux.errors import FetchError, SettingsError
from auraflux.weights.download.pull import BUILT_IN, models_folder
from auraflux.weights.download.short_names import full_name
from auraflux.weights.formats.model_files import SPLIT


def local_models() -> Iterator[tuple[str, Path]]:
    """Yield the name and path of each model: built-in ones, then those of the hub's cache."""
    for name in BUILT_IN:
        path = models_folder() / f"{name}.gguf"
        if path.exists():
            yield name, path
    yield from _cached(_hub_folder())


def find_downloaded(name: str) -> Path | None:
    """Return the path of a downloaded model by its name or short name; None if it is not downloaded."""
    return dict(local_models()).get(full_name(name))


def files_nbytes(name: str) -> int:
    """Return the size on disk of a downloaded model."""
    path = find_downloaded(name)
    if path is None:
        return 0
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files if each.is_file())


def remove(name: str, in_use: Iterable[Path] = ()) -> bool:
    """Delete a downloaded model by its name in `local_models` or its short name; return whether there was one.

    in_use  paths of models that are served, which are not deleted
    """
    path = find_downloaded(name)
    if path is None:
        return False
    whole = path.parents[1] if path.is_dir() else path
    if any(each.absolute().is_relative_to(whole.absolute()) or each.resolve() == path.resolve() for each in in_use):
        raise SettingsError(f"the model {name} is in use and cannot be deleted.")
    try:
        if path.is_dir():
            # models--org--name, above snapshots and the commit
            shutil.rmtree(whole)
        else:
            # a file of the hub's cache is a link to its content
            path.resolve().unlink()
            path.unlink(missing_ok=True)
    except OSError as err:
        raise FetchError(f"the model {name} cannot be deleted: {err.strerror or err}.") from err
    return True


def _hub_folder() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _cached(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the models of the hub's cache: a repository's folder, and each GGUF file, at its newest commit."""
    for repository in sorted(folder.glob("models--*--*")):
        snapshot = _newest(repository)
        if snapshot is None:
            continue
        name = repository.name.removeprefix("models--").replace("--", "/", 1)
        if (snapshot / "config.json").exists() and any(snapshot.glob("*.safetensors")):
            yield name, snapshot
        for file in sorted(snapshot.rglob("*.gguf")):
            split = SPLIT.fullmatch(file.name)
            if split is None or int(split[2]) == 1:
                yield f"{name}/{file.relative_to(snapshot)}", file


def _newest(repository: Path) -> Path | None:
    main = repository / "refs" / "main"
    if main.is_file():
        named = repository / "snapshots" / main.read_text(errors="replace").strip()
        if named.is_dir():
            return named
    return max((repository / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime, default=None)
