"""What ranks compare before they begin: that their files are those of one model, and that they run the same program."""

import hashlib
from pathlib import Path
from typing import Any

import torch

from auraflux.machine import this_machine, versions
from auraflux.weights.stored import Checkpoint

SAMPLED = 1 << 16  # bytes at the beginning, in the middle and at the end of each file; headers lie at the beginning


def identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """A digest of every file of a model, by its name, without reading large ones whole; and this program's version."""
    root = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    return {
        "version": versions("auraflux")["auraflux"],
        "files": {str(path.relative_to(root)): _digest(path) for path in checkpoint.files()},
    }


def rounding() -> dict[str, Any]:
    """What the last bits of a result depend on."""
    try:
        from auraflux.ops.simd.isa import ISA

        instructions = ISA.name
    except ImportError:
        # without Numba no kernel of a CPU runs
        instructions = None
    versioned = versions("torch", "numba")
    return {"processor": this_machine().cpu, "instructions": instructions, "threads": torch.get_num_threads(), **versioned}


def difference(mine: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Say what another rank has that is not the same; None if all is."""
    if mine["version"] != other["version"]:
        return f"it runs version {other['version']}, and rank 0 runs {mine['version']}"
    ours, theirs = mine["files"], other["files"]
    for name in sorted({*ours, *theirs}):
        if name not in theirs:
            return f"it has no file {name}"
        if name not in ours:
            return f"it has a file {name} that rank 0 has not"
        if ours[name] != theirs[name]:
            return f"its {name} is another than rank 0's"
    return None


def _digest(path: Path) -> str:
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for start in sorted({0, max(0, size // 2 - SAMPLED // 2), max(0, size - SAMPLED)}):
            file.seek(start)
            found.update(file.read(SAMPLED))
    return found.hexdigest()
