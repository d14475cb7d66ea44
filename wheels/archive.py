"""Write a wheel of compiled kernels, which accompanies the package of the same version."""

import base64
import hashlib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import auraflux

ROOT = Path(__file__).parents[1]
DATE = (1980, 1, 1, 0, 0, 0)  # of all files, so that equal contents give equal wheels


@dataclass(frozen=True)
class About:
    """What a wheel says about itself.

    package   its only package
    module    docstring of the package
    tag       Python, ABI and system that it is for
    python    versions of Python
    requires  packages that its kernels depend on, beside auraflux
    """

    package: str
    module: str
    summary: str
    tag: str
    python: str
    requires: tuple[str, ...]


def files_of(folder: Path, *patterns: str) -> dict[str, bytes]:
    """Return the files below a folder with these names, by their path in it."""
    found = sorted(path for pattern in patterns for path in folder.rglob(pattern))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def write_wheel(about: About, files: dict[str, bytes], folder: Path) -> Path:
    """Write a wheel of kernels, named by their path in the package."""
    stem = f"{about.package}-{auraflux.__version__}"
    contents = {f"{about.package}/__init__.py": f'"""{about.module}"""\n'.encode()}
    contents[f"{stem}.dist-info/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    contents |= {f"{about.package}/{name}": content for name, content in files.items()}
    contents[f"{stem}.dist-info/METADATA"] = "\n".join([*_metadata(about), ""]).encode()
    lines = ["Wheel-Version: 1.0", "Generator: auraflux", "Root-Is-Purelib: true", f"Tag: {about.tag}", ""]
    contents[f"{stem}.dist-info/WHEEL"] = "\n".join(lines).encode()
    record = f"{stem}.dist-info/RECORD"
    contents[record] = "\n".join([*map(_recorded, contents.items()), f"{record},,", ""]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{stem}-{about.tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in contents.items():
            entry = zipfile.ZipInfo(name, DATE)
            entry.external_attr, entry.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return wheel


def _metadata(about: About) -> Iterator[str]:
    version = auraflux.__version__
    yield from ("Metadata-Version: 2.4", f"Name: {about.package.replace('_', '-')}", f"Version: {version}")
    yield f"Summary: {about.summary}"
    yield from ("License-Expression: Apache-2.0", "License-File: LICENSE", f"Requires-Python: {about.python}")
    yield from (f"Requires-Dist: {each}" for each in (f"auraflux=={version}", *about.requires))


def _recorded(entry: tuple[str, bytes]) -> str:
    """Return the line of a file in the wheel's RECORD."""
    name, content = entry
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}"
