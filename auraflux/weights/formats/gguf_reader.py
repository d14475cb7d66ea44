"""`read_header`: metadata and tensors of a GGUF file, by the `gguf` package, without torch."""

import mmap
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGUFValueType

from auraflux.errors import FormatError
from auraflux.weights.formats.untrusted import brief, regular_file


class Reader(gguf.GGUFReader):
    """GGUFReader with fast arrays: the package parses each element separately, which takes seconds for a vocabulary."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        order = self.byte_order if override_order is None else override_order
        # plain arrays of the mapped file: a view of a memmap takes ten times as long
        return np.frombuffer(self._mapped, np.dtype(dtype).newbyteorder(order), int(count), int(offset))

    @property
    def _mapped(self) -> mmap.mmap:
        mapped: Any = self.data.base
        assert isinstance(mapped, mmap.mmap)
        return mapped

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
                raise ValueError("an array extends past the end of the file")
            parts, end = [values], start + values.nbytes
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        return end - orig_offs, parts, list(range(len(parts))), [GGUFValueType.ARRAY, GGUFValueType(kind)]

    def _strings(self, start: int, count: int) -> tuple[list[Any], int]:
        mapped, length_at = self._mapped, struct.Struct("<Q").unpack_from
        parts = []
        for _ in range(count):
            first = start + 8
            # raises past the end of the file
            start = first + length_at(mapped, start)[0]
            # bytes, since the garbage collector would visit views again and again
            parts.append(mapped[first:start])
        if start > len(mapped):
            raise ValueError("a string extends past the end of the file")
        return parts, start


def contents(field: gguf.ReaderField) -> Any:
    """Return a field's value; faster for strings than the package, which copies each of them twice."""
    if field.types and field.types[0] == GGUFValueType.ARRAY and field.types[-1] == GGUFValueType.STRING:
        return [bytes(field.parts[i]).decode() for i in field.data]
    return field.contents()


def read_header(path: Path) -> Reader:
    """Open a GGUF file: its metadata and tensors, mapped."""
    path = regular_file(path)
    try:
        # copy-on-write, since torch needs writable arrays; nothing writes to them
        reader = Reader(path, "c")
    # the package raises many kinds of errors on a damaged file
    except Exception as err:
        raise FormatError(f"{path} cannot be read as GGUF: {brief(err)}. It may be truncated; download it again.") from err
    if reader.byte_order == "S":
        raise FormatError(f"{path} is a GGUF file of the other byte order, which is not supported.")
    return reader
