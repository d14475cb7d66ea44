"""Packed experts of a real model's size with random codes, for measuring offload."""

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from auraflux.errors import InputError
from auraflux.ops.moe.experts import blob_of
from auraflux.ops.simd.isa import ISA
from auraflux.quant import QTensor, quantize
from auraflux.weights.experts import packed_files
from auraflux.weights.experts.packed_files import ExpertFiles, open_experts, stride_of, write_format, write_layer
from auraflux.weights.experts.page_cache import drop_page_cache

BITS, GROUP = 4, 64
DISK_FACTOR = 1.05  # times the files' size must be free on the disk


@dataclass(frozen=True)
class Shape:
    """The shape of an MoE layer: hidden and intermediate width, number of experts, experts per token."""

    hidden: int
    inner: int
    count: int
    k: int

    def __post_init__(self) -> None:
        if self.hidden % GROUP or self.inner % GROUP or min(self.hidden, self.inner, self.k) < 1 or self.k > self.count:
            raise InputError(
                f"a mixture of {self.count} experts of widths {self.hidden} and {self.inner}, {self.k} for each token, cannot "
                f"be made: widths must be multiples of {GROUP}, and a token needs 1 to {self.count} experts."
            )

    @property
    def expert_nbytes(self) -> int:
        return stride_of(3 * self.hidden * self.inner * (BITS * GROUP + 32) // (8 * GROUP))


SHAPES = {
    "35b-a3b": Shape(2048, 512, 256, 8),
    "397b-a17b": Shape(4096, 1024, 512, 10),
    "deepseek-v3": Shape(7168, 2048, 256, 8),
}


def parse_shape(text: str) -> Shape:
    """Parse the name of a known model, or H,I,E,k in numbers."""
    if text in SHAPES:
        return SHAPES[text]
    if not re.fullmatch(r"\d{1,9}(,\d{1,9}){3}", text):
        raise InputError(f"{text!r} is not a shape. Name one of {', '.join(SHAPES)}, or give H,I,E,k such as 2048,512,256,8.")
    return Shape(*map(int, text.split(",")))


def build(
    folder: Path, shape: Shape, layers: int, advance: Callable[[int], None] = lambda nbytes: None, lanes: int = ISA.lanes
) -> ExpertFiles:
    """Write the experts of some layers with so many interleaved rows, and drop them from the page cache."""
    needed, free = layers * shape.count * shape.expert_nbytes, shutil.disk_usage(folder).free
    if needed * DISK_FACTOR > free:
        raise InputError(
            f"{layers} layers of experts take {needed / 1e9:.1f} GB, and the disk of {folder} has {free / 1e9:.1f} GB free. "
            "Use fewer --layers, or another --scratch folder."
        )
    like = _expert(shape, lanes)
    home = folder / packed_files.FOLDER
    home.mkdir()
    entries = []
    for layer in range(layers):
        sums = _write(home / f"layer_{layer:03d}.bin", like, shape, layer, advance)
        entries.append(write_layer(f"model.layers.{layer}.mlp", f"layer_{layer:03d}.bin", 0, sums))
    manifest = {
        "format": packed_files.NAME,
        "version": packed_files.VERSION,
        "model_type": "synthetic",
        "source": "random",
        "count": shape.count,
        "hidden": shape.hidden,
        "inner": shape.inner,
        "lanes": like["gate"].lanes,
        "formats": [write_format(like)],
        "layers": entries,
    }
    (home / packed_files.MANIFEST).write_text(json.dumps(manifest))
    return open_experts(folder)


def _expert(shape: Shape, lanes: int) -> dict[str, QTensor]:
    """Make one expert; the others share its scales and have their own codes."""
    torch.manual_seed(0)
    widths = {"gate": (shape.inner, shape.hidden), "up": (shape.inner, shape.hidden), "down": (shape.hidden, shape.inner)}
    return {
        kind: quantize((torch.randn(rows, width) / width**0.5).bfloat16(), BITS, GROUP).interleave(lanes)
        for kind, (rows, width) in widths.items()
    }


def _write(path: Path, like: dict[str, QTensor], shape: Shape, seed: int, advance: Callable[[int], None]) -> np.ndarray:
    random = np.random.default_rng(seed)
    form = write_format(like)
    blob = np.zeros(form["stride"], np.uint8)
    blob[: form["nbytes"]] = blob_of(like).numpy()
    codes = [(form[kind]["offsets"]["packed"], like[kind].packed.nbytes) for kind in like]
    sums = np.zeros(shape.count, np.uint32)
    with path.open("wb", buffering=0) as file:
        for expert in range(shape.count):
            for offset, nbytes in codes:
                blob[offset : offset + nbytes] = np.frombuffer(random.bytes(nbytes), np.uint8)
            sums[expert] = zlib.crc32(blob[: form["nbytes"]].data)
            file.write(blob.data)
            advance(len(blob))
        os.fsync(file.fileno())
        drop_page_cache(file.fileno())
    return sums
