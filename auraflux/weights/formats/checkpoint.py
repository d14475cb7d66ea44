"""`open_checkpoint`: opens a path with the reader of its format."""

from pathlib import Path
from typing import TYPE_CHECKING

from auraflux.weights.formats.model_files import check_gguf

if TYPE_CHECKING:
    from auraflux.weights.formats.stored import Checkpoint


def open_checkpoint(path: str | Path) -> "Checkpoint":
    """Open a folder of safetensors, or a GGUF file."""
    path = Path(path)
    if path.is_dir():
        from auraflux.weights.formats.folder import Folder

        return Folder(path)
    check_gguf(path)
    from auraflux.weights.formats.gguf import GGUFFile

    return GGUFFile(path)
