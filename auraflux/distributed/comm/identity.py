"""Checks between ranks before loading: the same model files, the same version, the same numerics."""

import hashlib
from pathlib import Path
from typing import Any

import torch

from auraflux.machine import this_machine, versions
from auraflux.weights.formats.stored import Checkpoint

SAMPLED = 1 << 16  # bytes at the beginning (headers included), in the middle and at the end of each file


def identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the version of auraflux and a digest of samples of every model file."""
    root = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    return {
        "version": versions("auraflux")["auraflux"],
        "files": {str(path.relative_to(root)): _digest(path) for path in checkpoint.files()},
    }


def numeric_environment() -> dict[str, Any]:
    """Return the facts on which the last bits of a result depend."""
    try:
        from auraflux.ops.simd.compile.cache_folder import PREBUILT
        from auraflux.ops.simd.isa import ISA

        instructions = ISA.name if PREBUILT is None else f"{ISA.name}, prebuilt for {PREBUILT.level.name}"
    except ImportError:
        # without Numba, no CPU kernels run
        instructions = None
    packages = versions("torch", "numba")
    return {"processor": this_machine().cpu, "instructions": instructions, "threads": torch.get_num_threads(), **packages}


def difference(mine: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Return how another rank differs from rank 0; None if it does not."""
    if mine["version"] != other["version"]:
        return f"it runs version {other['version']}, and rank 0 runs {mine['version']}"
    ours, theirs = mine["files"], other["files"]
    for name in sorted({*ours, *theirs}):
        if name not in theirs:
            return f"it has no file {name}"
        if name not in ours:
            return f"it has a file {name} that rank 0 lacks"
        if ours[name] != theirs[name]:
            return f"its {name} differs from rank 0's"
    return None


def numeric_difference(others: list[dict[str, Any]]) -> str | None:
    """Return how the numeric environment of another rank differs from this one; None if it does not."""
    mine = numeric_environment()
    return next(
        (
            f"its {name} is {each[name]}, and rank 0's {mine[name]}"
            for each in others
            for name in mine
            if each[name] != mine[name]
        ),
        None,
    )


def _digest(path: Path) -> str:
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for start in sorted({0, max(0, size // 2 - SAMPLED // 2), max(0, size - SAMPLED)}):
            file.seek(start)
            found.update(file.read(SAMPLED))
    return found.hexdigest()
