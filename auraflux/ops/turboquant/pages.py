"""Memory layout of codes: rows of packed words, and pages of rows in a pool shared by many sequences.

Coordinate d of a row takes bits [d * b, (d + 1) * b) of its little-endian stream of 32-bit words, so at 3 and 6 bits a code may
begin in one word and end in the next. On a GPU the codes of values may have another order: see `arrangement.py`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_shape
from auraflux.ops.attention.pages import DTYPES, rows_of, spans
from auraflux.ops.turboquant.arrangement import Arrangement
from auraflux.ops.turboquant.calibration import Calibration
from auraflux.ops.turboquant.codebook import Codebook, check_bits, explicit_codebook
from auraflux.ops.turboquant.full_precision import FullPrecisionKV, FullPrecisionLatents
from auraflux.ops.turboquant.rotation import check_rotation
from auraflux.validation import check_fields


def row_words(bits: int, width: int) -> int:
    """Count the 32-bit words of one row."""
    return -(-width * bits // 32)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [..., D] of any integer dtype into int32 words [..., row_words]."""
    width = codes.shape[-1]
    if 32 % bits == 0 and width * bits % 32 == 0:
        grouped = codes.long().unflatten(-1, (-1, 32 // bits))
        return (grouped << _shifts(bits, codes.device)).sum(-1).to(torch.int32)
    first, shift = _places(bits, width, codes.device)
    shifted = codes.long() << shift
    words = torch.zeros(*codes.shape[:-1], row_words(bits, width) + 1, dtype=torch.int64, device=codes.device)
    words.index_add_(-1, first, shifted & 0xFFFFFFFF)
    words.index_add_(-1, first + 1, shifted >> 32)
    return words[..., :-1].to(torch.int32)


def unpack(words: Tensor, bits: int, width: int) -> Tensor:
    """Unpack int32 words [..., row_words] into codes, int64 [..., D]."""
    if 32 % bits == 0 and width * bits % 32 == 0:
        return (words.long().unsqueeze(-1) >> _shifts(bits, words.device) & ((1 << bits) - 1)).flatten(-2)
    first, shift = _places(bits, width, words.device)
    low = words.long() & 0xFFFFFFFF
    following = torch.nn.functional.pad(low[..., 1:], (0, 1))
    return ((low | following << 32)[..., first] >> shift) & ((1 << bits) - 1)


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 32, bits, device=device)


def _places(bits: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    # the word each code begins in, and the bit of that word
    bit = torch.arange(width, device=device) * bits
    return bit // 32, bit % 32


@dataclass(frozen=True, eq=False)
class Codebooks:
    """Explicit codebooks of keys and values; None for the default one."""

    keys: Codebook | None = None
    values: Codebook | None = None

    def __post_init__(self) -> None:
        check_fields(self)


class PagedCodes:
    """Methods that quantized pages share with uncompressed ones."""

    def spans(self, starts: Tensor, tokens: int, reach: int | None) -> list[tuple[int, int, int, int, int]]:
        """Split a step by sequences, see `attention/pages.py`."""
        pages: Any = self
        return spans(pages, starts, tokens, reach)

    def rows_of(self, sequence: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return page and slot of each position in [first, last) of a sequence."""
        pages: Any = self
        return rows_of(pages, sequence, first, last)


@dataclass(frozen=True, eq=False)
class CodePages(PagedCodes):
    """Quantized keys and values of one layer, for a batch of sequences.

    key_codes, value_codes  [P, Hkv, page, words]  int32, rows of packed codes
    key_norms, value_norms  [P, Hkv, page]         float32
    table                   [B, M]                 int32, as for uncompressed pages
    lengths                 [B]                    int32
    key_bits, value_bits    from 2, 3, 4, 6, 8
    width                   D, of a head
    seed                    of the rotation
    arrangement             the order of the values' codes within a page
    calibration             mean and scale removed from keys before quantization, or None
    full_precision          sink tokens and recent window in full precision, or None
    codebooks               explicit codebooks; None for the default ones
    """

    key_codes: Tensor
    key_norms: Tensor
    value_codes: Tensor
    value_norms: Tensor
    table: Tensor
    lengths: Tensor
    key_bits: int
    value_bits: int
    width: int
    seed: int
    arrangement: Arrangement = Arrangement.ROWS
    calibration: Calibration | None = None
    full_precision: FullPrecisionKV | None = None
    codebooks: Codebooks | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_bits("key_bits", self.key_bits)
        check_bits("value_bits", self.value_bits)
        check_rotation(self.width, self.seed)
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        check_dense(**tensors)
        for name, tensor in tensors.items():
            check_dtype(name, tensor, torch.float32 if name.endswith("norms") else torch.int32)
        check_shape("key_codes", self.key_codes, None, None, None, row_words(self.key_bits, self.width))
        rows = self.key_codes.shape[:3]
        check_shape("value_codes", self.value_codes, *rows, row_words(self.value_bits, self.width))
        check_shape("key_norms", self.key_norms, *rows)
        check_shape("value_norms", self.value_norms, *rows)
        check_shape("table", self.table, None, None)
        check_shape("lengths", self.lengths, self.table.shape[0])
        if rows[1] < 1 or rows[2] < 1:
            raise InputError(
                f"'key_codes' has shape {list(self.key_codes.shape)}; at least one head and one row per page is needed."
            )
        if (reason := self.arrangement.refusal(rows[2], self.width)) is not None:
            raise InputError(reason)
        if self.calibration is not None:
            self.calibration.check(rows[1], self.width, self.capacity)
        if self.full_precision is not None:
            self.full_precision.check(rows[1], self.width, len(self.lengths))
        if self.codebooks is not None:
            for name, bits in (("keys", self.key_bits), ("values", self.value_bits)):
                if (book := getattr(self.codebooks, name)) is not None:
                    book.check(name, bits, self.key_codes)

    @classmethod
    def empty(
        cls,
        pool: int,
        heads: int,
        page: int,
        width: int,
        table: Tensor,
        lengths: Tensor,
        key_bits: int = 8,
        value_bits: int = 4,
        seed: int = 0,
        arrangement: Arrangement = Arrangement.ROWS,
    ) -> "CodePages":
        """Make a pool of zeroed pages on the table's device."""

        def zeros(*tail: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(pool, heads, page, *tail, dtype=dtype, device=table.device)

        return cls(
            zeros(row_words(key_bits, width), dtype=torch.int32),
            zeros(dtype=torch.float32),
            zeros(row_words(value_bits, width), dtype=torch.int32),
            zeros(dtype=torch.float32),
            table,
            lengths,
            key_bits,
            value_bits,
            width,
            seed,
            arrangement,
        )

    @cached_property
    def key_book(self) -> Codebook | None:
        """Codebook of keys; None for the default one."""
        return None if self.codebooks is None else explicit_codebook(self.codebooks.keys, self.width)

    @cached_property
    def value_book(self) -> Codebook | None:
        """Codebook of values; None for the default one."""
        return None if self.codebooks is None else explicit_codebook(self.codebooks.values, self.width)

    @cached_property
    def codes_only(self) -> "CodePages":
        """These pages without key calibration and full-precision rows."""
        if self.calibration is None and self.full_precision is None:
            return self
        return replace(self, calibration=None, full_precision=None)

    def arranged(self, arrangement: Arrangement) -> "CodePages":
        """Return these pages in another arrangement: themselves if they have it, otherwise with repacked values."""
        if arrangement is self.arrangement:
            return self
        codes = self.arrangement.restored(unpack(self.value_codes, self.value_bits, self.width))
        return replace(self, value_codes=pack(arrangement.stored(codes), self.value_bits), arrangement=arrangement)

    @cached_property
    def heads(self) -> int:
        return self.key_codes.shape[1]

    @cached_property
    def pool(self) -> tuple[int, int]:
        """Number of pages, and of tokens per page."""
        return self.key_codes.shape[0], self.key_codes.shape[2]

    @cached_property
    def capacity(self) -> int:
        """Positions that a row of the table holds."""
        return self.table.shape[1] * self.key_codes.shape[2]


class CodedRows(PagedCodes):
    """Pages of one quantized row for each position."""

    codes: Tensor

    @property
    def pool(self) -> tuple[int, int]:
        """Number of pages, and of tokens per page."""
        return self.codes.shape[0], self.codes.shape[1]


@dataclass(frozen=True, eq=False)
class LatentCodes(CodedRows):
    """Quantized latents of one layer, for a batch of sequences: one vector for all heads, and one unquantized RoPE key.

    codes    [P, page, words]  int32, rows of packed codes
    norms    [P, page]         float32
    rope     [P, page, R]      float32, bfloat16 or float16
    table    [B, M]            int32, as for uncompressed pages
    lengths  [B]               int32
    bits     from 2, 3, 4, 6, 8
    width    C, of a latent
    seed     of the rotation
    full_precision  sink tokens and recent window in full precision, or None
    levels   explicit codebook; None for the default one
    """

    codes: Tensor
    norms: Tensor
    rope: Tensor
    table: Tensor
    lengths: Tensor
    bits: int
    width: int
    seed: int
    full_precision: FullPrecisionLatents | None = None
    levels: Codebook | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_bits("bits", self.bits)
        check_rotation(self.width, self.seed)
        check_dense(codes=self.codes, norms=self.norms, rope=self.rope, table=self.table, lengths=self.lengths)
        check_dtype("norms", self.norms, torch.float32)
        check_dtype("rope", self.rope, *DTYPES)
        for name, tensor in (("codes", self.codes), ("table", self.table), ("lengths", self.lengths)):
            check_dtype(name, tensor, torch.int32)
        check_shape("codes", self.codes, None, None, row_words(self.bits, self.width))
        check_shape("norms", self.norms, *self.codes.shape[:2])
        check_shape("rope", self.rope, *self.codes.shape[:2], None)
        check_shape("table", self.table, None, None)
        check_shape("lengths", self.lengths, self.table.shape[0])
        if self.codes.shape[1] < 1 or self.rope.shape[2] < 1:
            raise InputError(
                f"'rope' has shape {list(self.rope.shape)}; at least one row per page and one coordinate is needed."
            )
        if self.full_precision is not None:
            self.full_precision.check(self.width, len(self.lengths))
        if self.levels is not None:
            self.levels.check("levels", self.bits, self.codes)

    @cached_property
    def book(self) -> Codebook | None:
        """Codebook; None for the default one."""
        return explicit_codebook(self.levels, self.width)


@dataclass(frozen=True, eq=False)
class RowCodes(CodedRows):
    """Pages of one quantized row for each position.

    codes    [P, page, words]  int32, rows of packed codes
    norms    [P, page]         float32
    table    [B, M]            int32, as for uncompressed pages
    lengths  [B]               int32
    bits     from 2, 3, 4, 6, 8
    width    D, of a row
    seed     of the rotation
    """

    codes: Tensor
    norms: Tensor
    table: Tensor
    lengths: Tensor
    bits: int
    width: int
    seed: int

    def __post_init__(self) -> None:
        check_fields(self)
        check_bits("bits", self.bits)
        check_rotation(self.width, self.seed)
        check_dense(codes=self.codes, norms=self.norms, table=self.table, lengths=self.lengths)
        check_dtype("norms", self.norms, torch.float32)
        for name, tensor in (("codes", self.codes), ("table", self.table), ("lengths", self.lengths)):
            check_dtype(name, tensor, torch.int32)
        check_shape("codes", self.codes, None, None, row_words(self.bits, self.width))
        check_shape("norms", self.norms, *self.codes.shape[:2])
        check_shape("table", self.table, None, None)
        check_shape("lengths", self.lengths, self.table.shape[0])
        if self.codes.shape[1] < 1:
            raise InputError(f"{self.codes.shape[0]} pages hold 0 tokens; at least one is needed.")
