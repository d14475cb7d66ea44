"""Packed model folders for tests."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from auraflux.models import family
from auraflux.ops.simd.isa import ISA
from auraflux.quant import QTensor
from auraflux.weights.convert.mlx_folder import convert
from auraflux.weights.convert.pack import pack
from auraflux.weights.experts.packed_files import ExpertFile, ExpertFiles, open_experts
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.models.oracles import save
from tests.weights.tiny_models import tiny


def hf_folder(folder: Path, kind: str = "qwen3_moe") -> Path:
    return save(tiny(kind), folder)


def packed(source: Path, target: Path, **options: Any) -> Path:
    checkpoint = open_checkpoint(source)
    return pack(checkpoint, family(checkpoint.config), target, **{"lanes": ISA.lanes, **options})


def converted(source: Path, target: Path, **options: Any) -> Path:
    checkpoint = open_checkpoint(source)
    return convert(checkpoint, family(checkpoint.config), target, **options)


def experts_of(folder: Path) -> ExpertFiles:
    found = open_experts(folder)
    found.check()
    return found


def matrices(file: ExpertFile, expert: int) -> dict[str, QTensor]:
    """Return the gate, up and down matrices of an expert from its file."""
    from auraflux.ops.moe.experts import Experts

    data = np.fromfile(file.path, np.uint8).reshape(file.count, file.stride)
    stacks = Experts.from_blobs(torch.from_numpy(data), file.like)
    return {kind: getattr(stacks, kind)[expert] for kind in ("gate", "up", "down")}


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of every file under a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
