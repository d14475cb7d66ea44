"""Models on the Hugging Face hub: fetched by commit, and held against the hashes that the hub has of their files.

What is fetched lies in the hub's own cache, in a folder named after the commit. What is there already is taken as it is.
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
from auraflux.weights.verified import digest

Report = Callable[[str, int, int], None]  # what is done, bytes so far, bytes in all
Hash = tuple[str, str]  # its kind, see `digest`, and itself

# beside config and weights; no code. Folders within a repository hold the same weights in other forms
PATTERNS: dict[str, Any] = {
    "allow_patterns": ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"],
    "ignore_patterns": ["*/*"],
}


def from_hub(repository: str, revision: str | None, file: str | None, report: Report) -> Path:
    """Give the path of a repository's model, or of one file of it, fetching it if it is not here; None: the newest revision."""
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        found = _here(repository, revision, file)
        if found is None:
            _find_host()
            found = _fetched(repository, revision, file, report)
        return found
    except AurafluxError:
        raise
    # the hub's client raises its own errors and those of whichever HTTP library is below it
    except Exception as err:
        reason = (str(err).strip().splitlines() or [type(err).__name__])[0].rstrip(".")
        raise FetchError(
            f"{repository} is no folder here, and could not be fetched from the Hugging Face hub: {reason}."
        ) from err


def _find_host() -> None:
    """Fail at once where there is no network; the hub's client would try again for half a minute."""
    from huggingface_hub.constants import ENDPOINT

    host = urllib.parse.urlparse(ENDPOINT).hostname
    if not urllib.request.getproxies():
        socket.getaddrinfo(host, None)


def _here(repository: str, revision: str | None, file: str | None) -> Path | None:
    """What was fetched of a repository before, if it is whole; the network is not asked."""
    import huggingface_hub as hub
    from huggingface_hub.errors import EntryNotFoundError

    if file is not None:
        cached = hub.try_to_load_from_cache(repository, file, revision=revision)
        return Path(cached) if isinstance(cached, str) else None
    try:
        folder = Path(hub.snapshot_download(repository, revision=revision, local_files_only=True, **PATTERNS))
    except (OSError, ValueError, EntryNotFoundError):
        return None
    files = list(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    return folder if _whole(folder) else None


def _whole(folder: Path) -> bool:
    """Whether config and all weights of a folder are there."""
    from auraflux.weights.folder import Folder

    try:
        return bool(Folder(folder).sizes())
    except FormatError:
        return False


def _fetched(repository: str, revision: str | None, file: str | None, report: Report) -> Path:
    """Fetch one commit, whatever is pushed meanwhile, and check all files that it has hashes of."""
    import huggingface_hub as hub

    about = hub.model_info(repository, revision=revision, files_metadata=True)
    hashes = {each.rfilename: _hash(each) for each in about.siblings or []}
    name = file or _only_file(repository, list(hashes))
    if name is not None:
        found = Path(hub.hf_hub_download(repository, name, revision=about.sha))
        _verify({name: found}, hashes, repository, report)
        return found
    folder = Path(hub.snapshot_download(repository, revision=about.sha, **PATTERNS))
    _verify({str(path.relative_to(folder)): path for path in folder.iterdir() if path.is_file()}, hashes, repository, report)
    return folder


def _only_file(repository: str, files: list[str]) -> str | None:
    """The GGUF file that a repository is; None where it is a folder of safetensors."""
    if "config.json" in files and any(name.endswith(".safetensors") for name in files):
        return None
    models = sorted(name for name in files if name.endswith(".gguf"))
    if not models:
        raise FetchError(f"{repository} on the Hugging Face hub has neither safetensors with a config.json nor a GGUF file.")
    if len(models) > 1:
        raise FetchError(f"{repository} has several GGUF files; name one: {', '.join(f'{repository}/{m}' for m in models)}.")
    return models[0]


def _hash(sibling: Any) -> Hash | None:
    """What the hub says of a file: large ones have a SHA-256, others the name that git gives their contents."""
    if sibling.lfs is not None:
        return "sha256", sibling.lfs.sha256
    return None if sibling.blob_id is None else ("git", sibling.blob_id)


def _verify(files: dict[str, Path], hashes: dict[str, Hash | None], repository: str, report: Report) -> None:
    """Hold files against their hashes; one that differs is removed, so that it is fetched again."""
    for name, path in files.items():
        wanted = hashes.get(name)
        if wanted is None:
            continue
        found = digest(path, wanted[0], partial(report, f"checking {name}"))
        if found != wanted[1]:
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise FetchError(
                f"{name} of {repository} was fetched with {wanted[0]} {found}; the hub says {wanted[1]}. It was removed."
            )
