"""What tells one model's files from another's, or from the same after a change, without reading them."""

import hashlib
from pathlib import Path

ENDINGS = (".safetensors", ".json", ".gguf", ".bin")


def fingerprint(path: Path, *more: object) -> str:
    """A name for the files of a model as they are now, and for how they are used."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    facts = [(str(file.relative_to(path)), file.stat().st_size, file.stat().st_mtime_ns) for file in files if _counts(file)]
    return hashlib.sha256(repr((str(path.resolve()), facts, more)).encode()).hexdigest()[:32]


def _counts(file: Path) -> bool:
    return file.suffix in ENDINGS and file.is_file()
