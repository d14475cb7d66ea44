"""Identity of a model's files from their names, sizes and modification times."""

import hashlib
from pathlib import Path

SUFFIXES = (".safetensors", ".json", ".gguf", ".bin")


def fingerprint(path: Path, *settings: object) -> str:
    """Return a hash of a model's path, its files' sizes and mtimes, and further settings."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    stats = [
        (str(file.relative_to(path)), file.stat().st_size, file.stat().st_mtime_ns) for file in files if _is_model_file(file)
    ]
    return hashlib.sha256(repr((str(path.resolve()), stats, settings)).encode()).hexdigest()[:32]


def _is_model_file(file: Path) -> bool:
    return file.suffix in SUFFIXES and file.is_file()
