"""`GGUFFile`: a checkpoint read by the `gguf` package, with tensor names and row order mapped to Hugging Face's."""

import mmap
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant import QTensor
from auraflux.quant.gguf_blocks import REQUANTIZED_BITS, from_blocks, requantized_group, to_dense
from auraflux.quant.gguf_layouts import LAYOUTS
from auraflux.weights.experts.packed_files import ExpertFiles
from auraflux.weights.experts.row_table import TablePart
from auraflux.weights.fields import ConfigFile
from auraflux.weights.formats.gguf_architectures import architecture
from auraflux.weights.formats.gguf_config import FREQUENCIES
from auraflux.weights.formats.gguf_names import make_config, mtp_tensor_name, tensor_name
from auraflux.weights.formats.gguf_reader import contents, read_header
from auraflux.weights.formats.model_files import gguf_parts
from auraflux.weights.formats.stored import Stored
from auraflux.weights.formats.untrusted import brief

DENSE = {"F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64"}
VOCABULARY = [f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "scores", "token_type")]


class GGUFFile:
    """Checkpoint in one GGUF file, or split into several named -00001-of-00003 and so on.

    metadata  the file's metadata under its original keys
    """

    form = "gguf"
    experts: ExpertFiles | None = None

    def __init__(self, path: Path):
        self.path = path
        self._readers = [read_header(part) for part in gguf_parts(path)]
        self._architecture = architecture(self.metadata)
        tensors = {tensor.name: (reader, tensor) for reader in self._readers for tensor in reader.tensors}
        frequencies = tensors.pop(FREQUENCIES, None)
        self._tensors = {tensor_name(name, self._architecture): found for name, found in tensors.items()}
        shapes = {name: self.shape(name) for name in self._tensors}
        config = make_config(self.metadata, shapes, None if frequencies is None else frequencies[1].data)
        self.config: dict[str, Any] = ConfigFile(config, self.path)
        self._tensors = {mtp_tensor_name(name, self.config, self._architecture): found for name, found in self._tensors.items()}
        self.notes = self._notes()

    @cached_property
    def metadata(self) -> ConfigFile:
        try:
            fields = self._readers[0].fields.items()
            found = {key: contents(field) for key, field in fields if not key.startswith("GGUF.")}
        except UnicodeDecodeError as err:
            raise FormatError(f"{self.path} has metadata that is not UTF-8: {brief(err)}.") from err
        for reader in self._readers:
            # a vocabulary takes as much memory again here
            reader.fields.clear()
        return ConfigFile(found, self.path)

    @property
    def pooling_type(self) -> int | None:
        """Number of the pooling type; None for a model that is not one for embeddings."""
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.pooling_type")

    def drop_vocabulary(self) -> None:
        """Forget the lists of tokens, merges, scores and types."""
        for key in VOCABULARY:
            self.metadata.pop(key, None)

    @cached_property
    def formats(self) -> dict[str, str]:
        """GGUF type of each tensor, such as Q4_1."""
        return {name: tensor.tensor_type.name for name, (_, tensor) in self._tensors.items()}

    def _notes(self) -> list[str]:
        counts = Counter(
            (kind, requantized_group(self.shape(name)[-1]))
            for name, kind in self.formats.items()
            if kind not in DENSE and kind not in LAYOUTS and len(self.shape(name)) > 1
        )
        return [
            f"GGUF type {kind} ({count} of {len(self._tensors)} tensors) is "
            f"requantized to {REQUANTIZED_BITS} bits in groups of {group}."
            for (kind, group), count in sorted(counts.items())
        ]

    def files(self) -> list[Path]:
        return gguf_parts(self.path)

    def sizes(self) -> dict[str, int]:
        return {name: int(tensor.n_bytes) for name, (_, tensor) in self._tensors.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._architecture.shape(name, tuple(int(size) for size in reversed(self._tensors[name][1].shape)))

    def load(self, name: str) -> Stored:
        shape = self.shape(name)
        found = self._stored(name, self._tensors[name][1].data, shape)
        return self._architecture.order(name, self.config, shape).restore(found)

    def load_interleaved(self, name: str, lanes: int, expands_scales: bool) -> QTensor | None:
        kind, shape = self.formats[name], self.shape(name)
        order = self._architecture.order(name, self.config, shape)
        if kind not in LAYOUTS or len(shape) != 2 or order.columns is not None:
            return None
        return convert(self._tensors[name][1].data, kind, lanes, expands_scales, order.rows, partial(self._release, name))

    def load_one(self, name: str, index: int) -> Stored:
        return self._stored(name, self._tensors[name][1].data[index], self.shape(name)[1:])

    def first_row(self, name: str) -> Stored:
        """Return the first row of a matrix, or of the first matrix of a stack, in the format of `load`."""
        array, width = self._tensors[name][1].data, self.shape(name)[-1]
        return self._stored(name, array.reshape(-1, array.shape[-1])[:1], (1, width))

    def _stored(self, name: str, array: NDArray[Any], shape: tuple[int, ...]) -> Stored:
        kind = self._tensors[name][1].tensor_type.name
        if kind in DENSE:
            return self._architecture.restore_values(name, _dense(array, kind).view(shape))
        if len(shape) == 1:
            return torch.from_numpy(to_dense(array, kind))
        found = convert(array, kind)
        return from_blocks(array, kind) if found is None else found

    def table_part(self, name: str) -> TablePart:
        raise FormatError(f"{name} in {self.path} does not support row reads; only safetensors do.")

    def unmap(self, names: Sequence[str]) -> None:
        """Do nothing: one file holds all tensors."""

    def release(self, name: str) -> None:
        self._release(name, 0, int(self._tensors[name][1].n_bytes))

    def _release(self, name: str, first: int, last: int) -> None:
        """Drop the mapped pages of some bytes of a tensor."""
        reader, tensor = self._tensors[name]
        first = -(-(tensor.data_offset + first) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (tensor.data_offset + last) // mmap.PAGESIZE * mmap.PAGESIZE
        pages: Any = reader.data.base
        if last > first and isinstance(pages, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            pages.madvise(mmap.MADV_DONTNEED, first, last - first)


def convert(
    octets: NDArray[Any],
    kind: str,
    lanes: int = 1,
    expands_scales: bool = False,
    order: Tensor | None = None,
    done: Callable[[int, int], None] = lambda first, last: None,
) -> QTensor | None:
    """Convert blocks to a QTensor by a CPU kernel; None if there is none for the type, or no Numba."""
    try:
        from auraflux.ops.layout.gguf import convert_rows
    except ModuleNotFoundError as err:
        if err.name != "numba":
            raise
        return None
    return convert_rows(octets, kind, lanes, expands_scales, order, done)


def dense_tensor(tensor: Any) -> Tensor | None:
    """Return a tensor of the package without blocks; None for one with blocks."""
    kind = tensor.tensor_type.name
    return _dense(tensor.data, kind) if kind in DENSE else None


def _dense(array: NDArray[Any], kind: str) -> Tensor:
    # tensors in a file may be aligned to less than their item size
    array = array if array.flags.aligned else array.copy()
    if kind == "BF16":
        return torch.from_numpy(array.reshape(-1)).view(torch.bfloat16)
    return torch.from_numpy(array)
