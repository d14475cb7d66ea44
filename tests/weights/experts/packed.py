"""Packed files of random experts, without a model."""

import json
import zlib
from pathlib import Path

import numpy as np
import torch

from auraflux.ops import Experts
from auraflux.ops.moe.experts import blob_of
from auraflux.ops.simd.isa import ISA
from auraflux.quant import QTensor, quantize
from auraflux.weights.experts.packed_files import (
    FOLDER,
    MANIFEST,
    NAME,
    VERSION,
    ExpertFiles,
    open_experts,
    write_format,
    write_layer,
)

HIDDEN, INNER, COUNT = 64, 128, 12


def stack(count: int, rows: int, width: int, lanes: int, distinct: int) -> QTensor:
    """Return a stack with `distinct` different matrices, as random ones are slow to quantize."""
    made = quantize((torch.randn(distinct, rows, width) / width**0.5).to(torch.bfloat16), 4, 64).interleave(lanes)
    which = torch.arange(count) % distinct
    return made._map(lambda t: t[which], shape=(count, rows, width))


def write_experts(
    folder: Path,
    layers: int = 2,
    count: int = COUNT,
    hidden: int = HIDDEN,
    inner: int = INNER,
    lanes: int = ISA.lanes,
    distinct: int | None = None,
) -> tuple[ExpertFiles, list[Experts]]:
    """Write layers of random experts; return the files and the same experts in memory."""
    target = folder / FOLDER
    target.mkdir(parents=True)
    resident, entries, form = [], [], None
    for layer in range(layers):
        made = {
            "gate": stack(count, inner, hidden, lanes, distinct or count),
            "up": stack(count, inner, hidden, lanes, distinct or count),
            "down": stack(count, hidden, inner, lanes, distinct or count),
        }
        form = write_format({kind: matrix[0] for kind, matrix in made.items()})
        rows = np.zeros((count, form["stride"]), np.uint8)
        for expert in range(count):
            rows[expert, : form["nbytes"]] = blob_of({kind: matrix[expert] for kind, matrix in made.items()}).numpy()
        (target / f"layer_{layer:03}.bin").write_bytes(rows.tobytes())
        sums = np.array([zlib.crc32(row[: form["nbytes"]]) for row in rows], np.uint32)
        entries.append(write_layer(f"model.layers.{layer}.mlp", f"layer_{layer:03}.bin", 0, sums))
        resident.append(Experts(**made))
    manifest = {"format": NAME, "version": VERSION, "model_type": "qwen3_moe", "source": "none", "count": count}
    manifest |= {"hidden": hidden, "inner": inner, "lanes": lanes, "formats": [form], "layers": entries}
    (target / MANIFEST).write_text(json.dumps(manifest))
    return open_experts(folder), resident
