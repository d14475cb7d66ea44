"""`Packing`: where each expert of a model is, and how it will lie in its file.

The model's constructor says which experts there are. Then workers take one at a time, from the checkpoint to the file, so that
no more of them are in memory than there are workers.
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
from auraflux.weights.convert import Shards, Writing, blank
from auraflux.weights.disk import forget
from auraflux.weights.expert_files import PARTS, ExpertFile, ExpertFiles, stride_of
from auraflux.weights.experts import stacks_of
from auraflux.weights.names import Rename
from auraflux.weights.rounding import one_thread_each
from auraflux.weights.stacks import Source
from auraflux.weights.stored import Checkpoint, Stored, is_blank
from auraflux.weights.streamed import LayerExperts, Resident

EXPERTS = re.compile(r"\.(switch_mlp|experts)\.")


@dataclass(frozen=True, eq=False)
class Layer:
    """The experts of one layer, and how they will be written.

    home     what mlx-lm calls them, such as model.layers.3.mlp.switch_mlp
    sources  of gate, if there is one, up and down
    like     one expert's matrices without memory
    """

    home: str
    count: int
    sources: dict[str, Source]
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


class Packing(Writing):
    """Weights that are written to files as they are taken, but for the experts, of which it is noted where they are.

    shards  None: nothing is written, only looked for
    lanes   how many rows of an expert's matrices shall lie side by side
    """

    def __init__(self, checkpoint: Checkpoint, rename: Rename, shards: Shards | None, lanes: int, **options: Any):
        experts = None if checkpoint.experts is None else Repacking(checkpoint.experts, self)
        super().__init__(checkpoint, rename, shards, experts=experts, **options)  # type: ignore[arg-type]
        self.lanes, self._seeking = lanes, False
        self._experts: dict[str, dict[str, tuple[int, Source, QTensor]]] = {}
        # experts are counted when they are written
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
        if not self._seeking:
            return super()._take(name, shape, index)
        self._found(name, shape)
        return blank(*(size or 1 for size in (shape if index is None else shape[1:])))

    def vector(self, name: str, *shape: int, dtype: torch.dtype = torch.float32, shift: float = 0.0) -> Tensor:
        if self.shards is not None:
            return super().vector(name, *shape, dtype=dtype, shift=shift)
        self._found(name, shape)
        return blank(*shape)

    def matrix(self, name: str, rows: int, width: int, take: Tensor | None = None, in_order: bool = False) -> Stored:
        if self.shards is not None:
            return super().matrix(name, rows, width, take, in_order)
        self._found(f"{name}.weight", (rows if take is None else None, width))
        return blank(rows, width)

    def rounded(self, found: Stored, name: str) -> Stored:
        return found if self.shards is None else super().rounded(found, name)

    def keep(self, name: str, value: Any) -> Any:
        return blank(*value.shape) if self.shards is None else super().keep(name, value)

    def stack(self, name: str, count: int, source: Source) -> Stored:
        first = source.matrix(0)
        if self.shards is None:
            self._seek(count, source)
            if not is_blank(first):
                home, _, kind = name.removesuffix("_proj.weight").rpartition(".")
                self._experts.setdefault(home, {})[kind] = (count, source, self.expert(first.to("meta"), name))
        return blank(count, *first.shape)

    def _seek(self, count: int, source: Source) -> None:
        if self.experts is not None:
            return
        self._seeking = True
        for expert in range(1, count):
            source.matrix(expert)
        self._seeking = False

    def written_as(self, value: QTensor) -> QTensor:
        return value

    def expert(self, found: Stored, name: str) -> QTensor:
        """One expert's matrix as it will be written."""
        if isinstance(found, Tensor):
            found = found.contiguous()
        made = super().rounded(found, name)
        if isinstance(made, QTensor):
            # rows are in order for a GPU, which reads no super-blocks
            return (made.widened() if self.lanes == 1 else made).interleave(self.lanes)
        if self.bits is None:
            kind = str(made.dtype).removeprefix("torch.")
            raise FormatError(
                f"the experts in {self.checkpoint.path} are not quantized: {name} is {kind}. "
                "Give --quantize BITS, such as --quantize 4, to round the model on the way."
            )
        raise FormatError(f"groups of {self.group} do not divide the width {made.shape[-1]} of {name}; try a smaller --group.")


class Repacking:
    """Experts that are packed already, as sources for packing them anew."""

    def __init__(self, files: ExpertFiles, plan: Packing):
        self.files, self.plan = files, plan

    def layer(
        self, module: str, count: int, hidden: int, inner: int, biases: Mapping[str, Tensor], activation: Activation | None
    ) -> LayerExperts:
        """Note where the experts of a mixture are, see `ExpertStore.layer`."""
        file = self.files.under(module, count, hidden, inner)
        file.check()
        home, mapped = f"{module}.{stacks_of(activation)}", MappedFile(file)
        made: dict[str, Any] = {
            kind: self.plan.stack(f"{home}.{kind}_proj.weight", count, Source(partial(mapped.matrix, kind), mapped.release))
            for kind in file.like
        }
        return Resident(Experts(**{"gate": None, **made}, **biases, activation=activation))


class MappedFile:
    """The experts of a layer over their file. Each is held against its checksum when its first matrix is taken."""

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
            raise FormatError(f"expert {expert} of {file.module} is damaged: {file.path} holds other bytes than were packed.")
        return getattr(self._stacks, kind)[expert]

    def release(self, expert: int) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED, self.file.offset(expert), self.file.stride)


def write_file(path: Path, plan: Packing, layer: Layer, advance: Callable[[int], None]) -> np.ndarray:
    """Write the experts of a layer; gives their checksums."""
    sums = np.zeros(layer.count, np.uint32)
    with path.open("wb") as file, one_thread_each() as pool:

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
        forget(file.fileno())
    return sums


def _blob(plan: Packing, layer: Layer, expert: int) -> Tensor:
    """One expert's bytes, filled up with zeros."""
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
