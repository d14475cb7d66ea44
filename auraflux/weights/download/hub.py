"""Download of models from the Hugging Face hub by commit, verified against the hub's file hashes.

Files are stored in the hub's cache, in a folder named after the commit. Cached files are used without another check.
"""

import socket
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from auraflux.errors import AurafluxError, FetchError, FormatError
from auraflux.weights.download.checksums import digest
from auraflux.weights.formats.model_files import PROJECTOR, SPLIT, projector_rank

Report = Callable[[str, int, int], None]  # phase, bytes so far, total bytes
Hash = tuple[str, str]  # kind, see `digest`, and value

# config, weights and tokenizer, but no code; subfolders of a repository have the same weights in other formats
PATTERNS: dict[str, Any] = {
    "allow_patterns": ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"],
    # of the folders only sentence-transformers' modules, such as 1_Pooling and 2_Dense
    "ignore_patterns": ["[!1-9]*/*", "[1-9][!_]*/*", "*/*/*"],
}


def from_hub(repository: str, revision: str | None, file: str | None, report: Report) -> Path:
    """Return the path of a repository's model or of one file, downloading it if not cached; revision None is the newest."""
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        found = _cached(repository, revision, file)
        if found is None:
            _resolve_host()
            found = _download(repository, revision, file, report)
        return found
    except AurafluxError:
        raise
    # the hub's client raises its own errors and those of its HTTP library
    except Exception as err:
        said = getattr(err, "strerror", None) or str(err)
        reason = (said.strip().splitlines() or [type(err).__name__])[0].rstrip(".")
        raise FetchError(
            f"{repository} is not a local folder, and could not be downloaded from the Hugging Face hub: {reason}."
        ) from err


def _resolve_host() -> None:
    """Fail at once without a network; the hub's client would retry for half a minute."""
    from huggingface_hub.constants import ENDPOINT

    host = urllib.parse.urlparse(ENDPOINT).hostname
    if not urllib.request.getproxies():
        socket.getaddrinfo(host, None)


def _cached(repository: str, revision: str | None, file: str | None) -> Path | None:
    """Return a completely cached model without using the network; None if files are missing."""
    import huggingface_hub as hub
    from huggingface_hub.errors import EntryNotFoundError

    if file is not None:
        cached = [hub.try_to_load_from_cache(repository, part, revision=revision) for part in split_names(file)]
        return Path(cached[0]) if isinstance(cached[0], str) and all(isinstance(each, str) for each in cached) else None
    try:
        folder = Path(hub.snapshot_download(repository, revision=revision, local_files_only=True, **PATTERNS))
    except (OSError, ValueError, EntryNotFoundError):
        return None
    files = [each for each in folder.glob("*.gguf") if not PROJECTOR.search(each.name)]
    if len(files) == 1:
        return files[0]
    return folder if _is_complete(folder) else None


def _is_complete(folder: Path) -> bool:
    """Return whether a folder has its config and all weights."""
    from auraflux.weights.formats.folder import Folder

    try:
        return bool(Folder(folder).sizes())
    except FormatError:
        return False


def _download(repository: str, revision: str | None, file: str | None, report: Report) -> Path:
    """Download one commit and verify all files with known hashes."""
    import huggingface_hub as hub

    about = hub.model_info(repository, revision=revision, files_metadata=True)
    hashes = {each.rfilename: _hash(each) for each in about.siblings or []}
    name = file or _only_file(repository, list(hashes))
    if name is not None:
        wanted = [*split_names(name), *_projector(name, list(hashes))]
        parts = {part: Path(hub.hf_hub_download(repository, part, revision=about.sha)) for part in wanted}
        _verify(parts, hashes, repository, report)
        return parts[split_names(name)[0]]
    folder = Path(hub.snapshot_download(repository, revision=about.sha, **PATTERNS))
    _verify({str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}, hashes, repository, report)
    return folder


def split_names(name: str) -> list[str]:
    """Return the names of all files of a split GGUF model, given any of them; otherwise the name itself."""
    folder, slash, file = name.rpartition("/")
    found = SPLIT.fullmatch(file)
    if found is None:
        return [name]
    return [f"{folder}{slash}{found[1]}-{i:05d}-of-{found[3]}.gguf" for i in range(1, int(found[3]) + 1)]


def _only_file(repository: str, files: list[str]) -> str | None:
    """Return the only GGUF file of a repository; None for a safetensors repository."""
    if "config.json" in files and any(name.endswith(".safetensors") for name in files):
        return None
    # a split model counts as its first file
    models = sorted({split_names(name)[0] for name in files if name.endswith(".gguf") and not PROJECTOR.search(name)})
    if not models:
        raise FetchError(f"{repository} on the Hugging Face hub has neither safetensors with a config.json nor a GGUF file.")
    if len(models) > 1:
        raise FetchError(f"{repository} has several GGUF files; name one: {', '.join(f'{repository}/{m}' for m in models)}.")
    return models[0]


def _projector(model: str, files: list[str]) -> list[str]:
    """Return the vision tower in the folder of a GGUF file, in the preferred format; none if there is none."""
    folder = model.rpartition("/")[0]
    towers = [name for name in files if name.rpartition("/")[0] == folder and name.endswith(".gguf") and PROJECTOR.search(name)]
    return sorted(towers, key=lambda name: (projector_rank(name), name))[:1]


def _hash(sibling: Any) -> Hash | None:
    """Return the hub's hash of a file: SHA-256 for LFS files, the git blob id for others."""
    if sibling.lfs is not None:
        return "sha256", sibling.lfs.sha256
    return None if sibling.blob_id is None else ("git", sibling.blob_id)


def _verify(files: dict[str, Path], hashes: dict[str, Hash | None], repository: str, report: Report) -> None:
    """Verify files against their hashes; remove one that differs, so that it is downloaded again."""
    for name, path in files.items():
        expected = hashes.get(name)
        if expected is None:
            continue
        found = digest(path, expected[0], partial(report, f"checking {name}"))
        if found != expected[1]:
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise FetchError(
                f"{name} of {repository} was downloaded with {expected[0]} {found}; the hub has {expected[1]}. It was removed."
            )
