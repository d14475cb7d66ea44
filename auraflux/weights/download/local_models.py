"""`local_models`: the models that are downloaded, by the names that load them. Uses no network."""

from collections.abc import Iterator
from pathlib import Path

from auraflux.weights.download.pull import BUILT_IN, models_folder
from auraflux.weights.formats.model_files import SPLIT


def local_models() -> Iterator[tuple[str, Path]]:
    """Yield the name and path of each model: built-in ones, then those of the hub's cache."""
    for name in BUILT_IN:
        path = models_folder() / f"{name}.gguf"
        if path.exists():
            yield name, path
    yield from _cached(_hub_folder())


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
