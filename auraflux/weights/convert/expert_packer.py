"""`ExpertPacker`: source of each expert in a checkpoint, and its layout in the packed file.

The model's constructor determines the experts. Workers then convert one expert at a time from the checkpoint to the file, so
there are never more experts in memory than workers.
"""

import mmap
import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.ops.moe.experts import Activation, Experts
from auraflux.quant import QTensor
from auraflux.weights.convert.mlx_folder import FolderWriter, Shards, placeholder
from auraflux.weights.convert.quantize_large import single_threaded_workers
from auraflux.weights.experts.load_layer import stack_name
from auraflux.weights.experts.packed_files import PARTS, ExpertFile, ExpertFiles, stride_of
from auraflux.weights.experts.page_cache import drop_page_cache
from auraflux.weights.experts.resident import LayerExperts, ResidentExperts
from auraflux.weights.experts.stacks import ExpertSource
from auraflux.weights.formats.stored import Checkpoint, Stored, is_placeholder
from auraflux.weights.names import Rename

EXPERTS = re.compile(r"\.(switch_mlp|experts)\.")


@dataclass(frozen=True, eq=False)
class Layer:
    """Experts of one layer and their layout.

    home     mlx-lm's module name, such as model.layers.3.mlp.switch_mlp
    sources  of gate (optional), up and down
    like     one expert's matrices on the meta device
    """

    home: str
    count: int
    sources: dict[str, ExpertSource]
    like: dict[str, QTensor]

    @property
    def module(self) -> str:
        return self.home.rpartition(".")[0]

    @property
    def file(self) -> str:
        stem = "mtp" if self.module.startswith("mtp.") else "layer"
        return f"{stem}_{int(re.findall(r'[0-9]+', self.module)[0]):03d}.bin"

    @property
    def expert_nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.like.values())

    @property
    def stride(self) -> int:
        return stride_of(self.expert_nbytes)

    @property
    def nbytes(self) -> int:
        return self.count * self.stride


class ExpertPacker(FolderWriter):
    """Folder writer that records the sources of experts instead of writing them.

    shards  None for a dry run, which only checks that all tensors exist
    lanes   interleaved rows of an expert's matrices
    """

    def __init__(self, checkpoint: Checkpoint, rename: Rename, shards: Shards | None, lanes: int, **options: Any):
        experts = None if checkpoint.experts is None else PackedExpertSource(checkpoint.experts, self)
        super().__init__(checkpoint, rename, shards, experts=experts, **options)
        self.lanes, self._only_checking = lanes, False
        self._experts: dict[str, dict[str, tuple[int, ExpertSource, QTensor]]] = {}
        # progress counts experts when they are written
        self._sizes |= {stored: 0 for ours, stored in self._stored.items() if EXPERTS.search(ours)}
        self.rest_nbytes = sum(self._sizes[stored] for stored in self._stored.values())

    @property
    def layers(self) -> list[Layer]:
        made = []
        for home, kinds in self._experts.items():
            sources = {kind: source for kind, (_, source, _) in kinds.items()}
            made.append(Layer(home, kinds["up"][0], sources, {kind: like for kind, (_, _, like) in kinds.items()}))
        return made

    def _take(self, name: str, shape: tuple[int | None, ...], index: int | None = None) -> Stored:
        if not self._only_checking:
            return super()._take(name, shape, index)
        self._found(name, shape)
        return placeholder(*(size or 1 for size in (shape if index is None else shape[1:])))

    def vector(self, name: str, *shape: int, dtype: torch.dtype = torch.float32, shift: float = 0.0) -> Tensor:
        if self.shards is not None:
            return super().vector(name, *shape, dtype=dtype, shift=shift)
        self._found(name, shape)
        return placeholder(*shape)

    def matrix(self, name: str, rows: int, width: int, take: Tensor | None = None, in_order: bool = False) -> Stored:
        if self.shards is not None:
            return super().matrix(name, rows, width, take, in_order)
        self._found(f"{name}.weight", (rows if take is None else None, width))
        return placeholder(rows, width)

    def quantized(self, found: Stored, name: str) -> Stored:
        return found if self.shards is None else super().quantized(found, name)

    def complete(self, name: str, value: Any) -> Any:
        return placeholder(*value.shape) if self.shards is None else super().complete(name, value)

    def stack(self, name: str, count: int, source: ExpertSource) -> Stored:
        first = source.matrix(0)
        if self.shards is None:
            self._check_experts(count, source)
            if not is_placeholder(first):
                home, _, kind = name.removesuffix("_proj.weight").rpartition(".")
                self._experts.setdefault(home, {})[kind] = (count, source, self.expert(first.to("meta"), name))
        return placeholder(count, *first.shape)

    def _check_experts(self, count: int, source: ExpertSource) -> None:
        if self.experts is not None:
            return
        self._only_checking = True
        for expert in range(1, count):
            source.matrix(expert)
        self._only_checking = False

    def to_file_layout(self, value: QTensor) -> QTensor:
        return value

    def expert(self, found: Stored, name: str) -> QTensor:
        """Return one expert's matrix in the packed layout."""
        if isinstance(found, Tensor):
            found = found.contiguous()
        made = super().quantized(found, name)
        if isinstance(made, QTensor):
            # GPU kernels need rows in order and do not support super-blocks
            return made.expand_scales().interleave(1) if self.lanes == 1 else _interleave(made, self.lanes)
        if self.bits is None:
            kind = str(made.dtype).removeprefix("torch.")
            raise FormatError(
                f"the experts in {self.checkpoint.path} are not quantized: {name} is {kind}. "
                "Give --quantize BITS, such as --quantize 4, to quantize the model."
            )
        raise FormatError(
            f"the width {made.shape[-1]} of {name} is not a multiple of {self.group}; try a smaller --group-size."
        )


class PackedExpertSource:
    """Packed experts as sources for repacking."""

    def __init__(self, files: ExpertFiles, plan: ExpertPacker):
        self.files, self.plan = files, plan

    def layer(
        self, module: str, count: int, hidden: int, inner: int, biases: Mapping[str, Tensor], activation: Activation | None
    ) -> LayerExperts:
        """Record the sources of an MoE layer's experts, see `ExpertStore.layer`."""
        file = self.files.file_of(module, count, hidden, inner)
        file.check()
        home, mapped = f"{module}.{stack_name(activation)}", MappedFile(file)
        made: dict[str, Any] = {
            kind: self.plan.stack(
                f"{home}.{kind}_proj.weight", count, ExpertSource(partial(mapped.matrix, kind), mapped.release)
            )
            for kind in file.like
        }
        return ResidentExperts(Experts(**{"gate": None, **made}, **biases, activation=activation))


class MappedFile:
    """Mapped experts of a packed layer. The checksum of an expert is verified when its first matrix is read."""

    def __init__(self, file: ExpertFile):
        self.file = file
        with file.path.open("rb") as opened:
            self._memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        self._blobs = torch.frombuffer(self._memory, dtype=torch.uint8).view(file.count, file.stride)
        self._stacks = Experts.from_blobs(self._blobs, file.like)

    def matrix(self, kind: str, expert: int) -> Stored:
        file = self.file
        blob = self._blobs[expert, : file.nbytes].numpy().data
        if kind == next(iter(file.like)) and zlib.crc32(blob) != file.checksum(expert):
            raise FormatError(f"expert {expert} of {file.module} is damaged: its checksum in {file.path} does not match.")
        return getattr(self._stacks, kind)[expert]

    def release(self, expert: int) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED, self.file.offset(expert), self.file.stride)


def _interleave(found: QTensor, lanes: int) -> QTensor:
    # imported here: it needs Numba, which a GPU does not
    from auraflux.ops.layout.rows import interleave

    return interleave(found, lanes)


def write_file(path: Path, plan: ExpertPacker, layer: Layer, advance: Callable[[int], None]) -> np.ndarray:
    """Write the experts of a layer and return their checksums."""
    sums = np.zeros(layer.count, np.uint32)
    with path.open("wb") as file, single_threaded_workers() as pool:

        def write(expert: int) -> None:
            blob = _blob(plan, layer, expert).numpy().data
            sums[expert] = zlib.crc32(blob[: layer.expert_nbytes])
            _write_all(file.fileno(), blob, expert * layer.stride)

        try:
            for done, _ in enumerate(pool.map(write, range(layer.count)), 1):
                advance(done * layer.stride)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        os.fsync(file.fileno())
        drop_page_cache(file.fileno())
    return sums


def _blob(plan: ExpertPacker, layer: Layer, expert: int) -> Tensor:
    """Return one expert's bytes, zero-padded to the stride."""
    blob = torch.zeros(layer.stride, dtype=torch.uint8)
    offset = 0
    for kind, like in layer.like.items():
        source = layer.sources[kind]
        made = plan.expert(source.matrix(expert), f"{layer.home}.{kind}_proj.weight")
        if (made.format, made.kind) != (like.format, like.kind):
            raise FormatError(f"expert {expert} of {layer.module} is {made!r} in {kind}, and expert 0 is {like!r}.")
        for part in PARTS:
            if (array := getattr(made, part)) is not None:
                blob[offset : offset + array.nbytes] = array.contiguous().view(-1).view(torch.uint8)
                offset += array.nbytes
        source.release(expert)
    return blob


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
