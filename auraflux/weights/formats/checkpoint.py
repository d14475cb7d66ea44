"""`open_checkpoint`: opens a path with the reader of its format."""

from pathlib import Path

from auraflux.errors import FormatError
from auraflux.weights.formats.stored import Checkpoint


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a folder of safetensors, or a GGUF file."""
    path = Path(path)
    if path.is_dir():
        from auraflux.weights.formats.folder import Folder

        return Folder(path)
    if not path.exists():
        raise FormatError(f"there is no model at {path}. A folder with config.json, or a .gguf file, is needed.")
    if path.suffix.lower() != ".gguf":
        raise FormatError(f"{path} is neither a folder nor a .gguf file.")
    from auraflux.weights.formats.gguf import GGUFFile

    return GGUFFile(path)
