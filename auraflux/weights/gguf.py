"""GGUF files as checkpoints. The `gguf` package reads them; here its tensors get other names and its blocks another order."""

import mmap
import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGUFValueType
from numpy.typing import NDArray
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant.gguf_blocks import LAYOUTS, REQUANTIZED_BITS, from_blocks, requantized_group, to_dense
from auraflux.weights.boundary import brief, listed, regular
from auraflux.weights.expert_files import ExpertFiles
from auraflux.weights.gguf_families import architecture
from auraflux.weights.gguf_settings import FREQUENCIES
from auraflux.weights.gguf_words import further, make_config, tensor_name
from auraflux.weights.model_keys import check_config, check_gguf
from auraflux.weights.row_table import TablePart
from auraflux.weights.stored import Stored

MAGIC = b"GGUF"
DENSE = {"F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64"}


class _Reader(gguf.GGUFReader):
    """The package's reader, which looks at each element of an array by itself: a vocabulary takes it seconds."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = int(self._get(orig_offs, np.uint32)[0]), int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        item = self.gguf_scalar_to_np.get(GGUFValueType(kind))
        if kind == GGUFValueType.STRING:
            parts, end = self._strings(start, count)
        elif item is not None:
            values = self._get(start, item, count)
            if len(values) < count:
                raise ValueError("an array goes on after the end of the file")
            parts, end = [values], start + values.nbytes
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        return end - orig_offs, parts, list(range(len(parts))), [GGUFValueType.ARRAY, GGUFValueType(kind)]

    def _strings(self, start: int, count: int) -> tuple[list[Any], int]:
        octets = self.data.data
        parts = []
        for _ in range(count):
            first = start + 8
            start = first + int.from_bytes(octets[start:first], "little")
            if start > len(octets):
                raise ValueError("a string goes on after the end of the file")
            parts.append(octets[first:start])
        return parts, start


def _read(path: Path) -> _Reader:
    path = regular(path)
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as err:
        raise FormatError(f"{path} cannot be read: {err.strerror}.") from err
    if magic != MAGIC:
        raise FormatError(f"{path} is not a GGUF file: it begins with {magic!r}, not {MAGIC!r}.")
    try:
        # mode "c" lets torch use the mapped arrays; nothing is ever written to them
        reader = _Reader(path, "c")
    # whatever the package stumbles over in a damaged file: there are errors of ten kinds
    except Exception as err:
        raise FormatError(f"{path} cannot be read as GGUF: {brief(err)}. It may have been cut short; fetch it again.") from err
    if reader.byte_order == "S":
        raise FormatError(f"{path} is a GGUF file of the other byte order, which is not supported.")
    return reader


def _parts(path: Path) -> list[Path]:
    """The files of a model that is cut into several, whichever of them is named; else the file itself."""
    found = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if found is None:
        return [path]
    stem, _, count = found.groups()
    paths = [path.with_name(f"{stem}-{i:05d}-of-{count}.gguf") for i in range(1, int(count) + 1)]
    if missing := [each.name for each in paths if not each.exists()]:
        raise FormatError(f"{path} is one of {len(paths)} files, and these are not beside it: {listed(missing)}.")
    return paths


class GGUFFile:
    """A checkpoint in one GGUF file, or in several with -00001-of-00003 and so on in their names.

    metadata  all that the file says besides tensors, under its own keys
    """

    form = "gguf"
    experts: ExpertFiles | None = None

    def __init__(self, path: Path):
        self.path = path
        self._readers = [_read(part) for part in _parts(path)]
        self._architecture = architecture(self.metadata)
        every = {tensor.name: (reader, tensor) for reader in self._readers for tensor in reader.tensors}
        frequencies = every.pop(FREQUENCIES, None)
        self._tensors = {tensor_name(name, self._architecture): found for name, found in every.items()}
        shapes = {name: self.shape(name) for name in self._tensors}
        self.config = make_config(self.metadata, shapes, None if frequencies is None else frequencies[1].data)
        check_config(self.path, self.config)
        self._tensors = {further(name, self.config, self._architecture): found for name, found in self._tensors.items()}
        self.notes = self._notes()

    @cached_property
    def metadata(self) -> dict[str, Any]:
        try:
            fields = self._readers[0].fields.items()
            found = {key: field.contents() for key, field in fields if not key.startswith("GGUF.")}
        except UnicodeDecodeError as err:
            raise FormatError(f"{self.path} has metadata that is not UTF-8: {brief(err)}.") from err
        check_gguf(self.path, found)
        return found

    @cached_property
    def formats(self) -> dict[str, str]:
        """The GGUF type of each tensor, such as Q4_1."""
        return {name: tensor.tensor_type.name for name, (_, tensor) in self._tensors.items()}

    def _notes(self) -> list[str]:
        counts = Counter(
            (kind, requantized_group(self.shape(name)[-1]))
            for name, kind in self.formats.items()
            if kind not in DENSE and kind not in LAYOUTS and len(self.shape(name)) > 1
        )
        return [
            f"GGUF type {kind} ({count} of {len(self._tensors)} tensors) is "
            f"rounded anew to {REQUANTIZED_BITS} bits in groups of {group}."
            for (kind, group), count in sorted(counts.items())
        ]

    def files(self) -> list[Path]:
        return _parts(self.path)

    def sizes(self) -> dict[str, int]:
        return {name: int(tensor.n_bytes) for name, (_, tensor) in self._tensors.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._architecture.shape(name, tuple(int(size) for size in reversed(self._tensors[name][1].shape)))

    def load(self, name: str) -> Stored:
        shape = self.shape(name)
        found = self._stored(name, self._tensors[name][1].data, shape)
        return self._architecture.order(name, self.config, shape).restore(found)

    def load_one(self, name: str, index: int) -> Stored:
        return self._stored(name, self._tensors[name][1].data[index], self.shape(name)[1:])

    def first_row(self, name: str) -> Stored:
        """The first row of a matrix, or of the first of a stack, as `load` would hold it."""
        array, width = self._tensors[name][1].data, self.shape(name)[-1]
        return self._stored(name, array.reshape(-1, array.shape[-1])[:1], (1, width))

    def _stored(self, name: str, array: NDArray[Any], shape: tuple[int, ...]) -> Stored:
        kind = self._tensors[name][1].tensor_type.name
        if kind in DENSE:
            return self._architecture.restored(name, _dense(array, kind).view(shape))
        if len(shape) == 1:
            return torch.from_numpy(to_dense(array, kind))
        return from_blocks(array, kind)

    def table_part(self, name: str) -> TablePart:
        raise FormatError(f"{name} in {self.path} cannot be read by rows: that is done of safetensors only.")

    def unmap(self, names: Sequence[str]) -> None:
        """Keep all of a file mapped: it holds everything."""

    def release(self, name: str) -> None:
        reader, tensor = self._tensors[name]
        first = -(-tensor.data_offset // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (tensor.data_offset + tensor.n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        pages = reader.data.base
        if last > first and isinstance(pages, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            pages.madvise(mmap.MADV_DONTNEED, first, last - first)


def _dense(array: NDArray[Any], kind: str) -> Tensor:
    # a file may align its tensors to less than a number's size
    array = array if array.flags.aligned else array.copy()
    if kind == "BF16":
        return torch.from_numpy(array.reshape(-1)).view(torch.bfloat16)
    return torch.from_numpy(array)
