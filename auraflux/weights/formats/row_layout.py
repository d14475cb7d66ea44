"""`RowFormat`: layout on disk of one row of a table, dense or quantized with scales and biases.

`convert` and `pack` write a row as one record: its parts in sequence, then their CRC-32. The name of such a tensor encodes the
format of its rows, as in `embedding.rows_0.affine4_64_bfloat16`.
"""

import re
import zlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from auraflux.quant import QTensor

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CHECKSUM_NBYTES = 4
NAME = re.compile(r"(?:affine([2-8])_(\d{1,4})_)?(bfloat16|float16|float32)")
RECORDS = re.compile(rf"\.rows_(\d+)\.({NAME.pattern})$")


@dataclass(frozen=True)
class RowFormat:
    """Format of a row of `width` values.

    dtype   of the values, or of scales and biases
    bits    of codes; None for dense values
    group   codes that share a scale
    """

    width: int
    dtype: torch.dtype
    bits: int | None = None
    group: int = 0

    @property
    def name(self) -> str:
        kind = next(name for name, dtype in DTYPES.items() if dtype is self.dtype)
        return kind if self.bits is None else f"affine{self.bits}_{self.group}_{kind}"

    @property
    def parts(self) -> list[int]:
        """Bytes of the values, or of codes, scales and biases."""
        if self.bits is None:
            return [self.width * self.dtype.itemsize]
        scales = self.width // self.group * self.dtype.itemsize
        return [self.width * self.bits // 8, scales, scales]

    @property
    def nbytes(self) -> int:
        return sum(self.parts)

    def dequantize(self, rows: Tensor) -> Tensor:
        """Dequantize rows: bytes [n, nbytes] -> float32 [n, width]."""
        if not len(rows):
            return torch.empty(0, self.width)
        parts = [part.contiguous() for part in rows.split(self.parts, 1)]
        if self.bits is None:
            return parts[0].view(self.dtype).float()
        scales, biases = (part.view(self.dtype) for part in parts[1:])
        codes = QTensor(parts[0].view(torch.int32), scales, biases, self.bits, self.group, (len(rows), self.width))
        return codes.dequantize(torch.float32)


def parse_row_format(name: str, nbytes: int) -> RowFormat | None:
    """Return the format with this name whose records have `nbytes` bytes; None if no width matches."""
    found = NAME.fullmatch(name)
    if found is None:
        return None
    bits, group, dtype = int(found[1] or 0), int(found[2] or 0), DTYPES[found[3]]
    nbytes -= CHECKSUM_NBYTES
    if not bits:
        made = RowFormat(nbytes // dtype.itemsize, dtype)
    elif not group:
        return None
    else:
        # bytes of a group: codes, scale and bias
        made = RowFormat(nbytes // (group * bits // 8 + 2 * dtype.itemsize) * group, dtype, bits, group)
    is_word_aligned = made.width * bits % 32 == 0
    return made if made.width > 0 and is_word_aligned and made.nbytes == nbytes else None


def row_format_of(rows: QTensor | Tensor) -> RowFormat:
    """Return the format in which rows will be stored."""
    if isinstance(rows, QTensor):
        return RowFormat(rows.shape[-1], rows.scales.dtype, rows.bits, rows.group)
    return RowFormat(rows.shape[-1], rows.dtype)


def as_bytes(rows: QTensor | Tensor) -> Tensor:
    """Return the bytes of rows without checksums: uint8 [n, nbytes]."""
    if isinstance(rows, Tensor):
        return rows.contiguous().view(torch.uint8)
    assert rows.biases is not None
    return torch.cat([part.contiguous().view(torch.uint8) for part in (rows.packed, rows.scales, rows.biases)], 1)


def with_checksums(rows: Tensor) -> Tensor:
    """Append the CRC-32 to each row: uint8 [n, nbytes] -> [n, nbytes + 4]."""
    found = np.fromiter(map(zlib.crc32, rows.contiguous().numpy()), np.uint32, len(rows))
    return torch.cat([rows, torch.from_numpy(found.view(np.uint8)).view(len(rows), CHECKSUM_NBYTES)], 1)
