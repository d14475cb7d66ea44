"""Positions that are kept as they are beside their codes: the first ones, and those next to a query.

A query at p reads the key and value at j as they are where j < `first` or p - j < `newest`, and as codes everywhere else. That
depends on no more than the two positions, so results do not depend on how tokens were cut into steps. "As they are" means not
rounded to codes, in the space of these: rotated, keys without their scale. The same query then meets both; what codes of keys
leave out besides, their centre, plain rows still have. The
latents of multi-head latent attention are kept likewise; their rotated keys are never coded.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.kinds import check_fields
from auraflux.ops._dispatch import check_dense, check_dtype, check_shape
from auraflux.ops.attention.pages import DTYPES, KVPages, rows_of


@dataclass(frozen=True, eq=False)
class RowPages:
    """Pages of one row for each position.

    rows     [P, page, C]  float32, bfloat16 or float16
    table    [B, M]        int32
    lengths  [B]           int32
    """

    rows: Tensor
    table: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        check_fields(self)
        check_dense(rows=self.rows, table=self.table, lengths=self.lengths)
        check_dtype("rows", self.rows, *DTYPES)
        check_dtype("table", self.table, torch.int32)
        check_dtype("lengths", self.lengths, torch.int32)
        check_shape("rows", self.rows, None, None, None)
        check_shape("table", self.table, None, None)
        check_shape("lengths", self.lengths, self.table.shape[0])
        if self.pool[1] == 0:
            raise InputError(f"{self.pool[0]} pages of 0 tokens were given; a page must hold at least one.")

    @cached_property
    def pool(self) -> tuple[int, int]:
        """How many pages there are, and how many tokens each holds."""
        return self.rows.shape[0], self.rows.shape[1]

    def rows_of(self, sequence: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Page and slot of each position in [first, last) of a sequence."""
        pages: Any = self
        return rows_of(pages, sequence, first, last)


PagesT = TypeVar("PagesT", KVPages, RowPages)


@dataclass(frozen=True, eq=False)
class Plain(Generic[PagesT]):
    """The plain rows of one layer's coded pages.

    head    pages of the first positions of each sequence; those its table has room for are read as they are. None for none
    recent  pages of the newest ones, as a window keeps them; None for none
    newest  how near to a query a position must be to be read from `recent`, its own counted
    """

    head: PagesT | None
    recent: PagesT | None
    newest: int

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.recent is None) != (self.newest == 0) or self.newest < 0:
            raise InputError(f"'newest' is {self.newest}; a positive number is needed with pages of recent positions, else 0.")

    @property
    def first(self) -> int:
        """How many of the first positions are read as they are."""
        return 0 if self.head is None else self.head.table.shape[1] * self.head.pool[1]

    @property
    def named(self) -> list[tuple[str, PagesT]]:
        """The pages there are, by name."""
        return [(name, pages) for name, pages in (("head", self.head), ("recent", self.recent)) if pages is not None]

    def covers(self, asking: Tensor, positions: Tensor) -> Tensor:
        """Tell which positions queries at `asking` read as they are, if they see them."""
        return (positions < self.first) | (asking - positions < self.newest)

    def check_tables(self, sequences: int) -> None:
        """Refuse tables of another number of sequences."""
        for name, pages in self.named:
            if len(pages.table) != sequences:
                raise InputError(f"'{name}' has tables of {len(pages.table)} sequences; {sequences} are coded.")


class PlainPages(Plain[KVPages]):
    """The plain keys and values of one layer's coded pages."""

    def check(self, heads: int, width: int, sequences: int) -> None:
        """Refuse pages of another shape."""
        for name, pages in self.named:
            if pages.k.shape[1::2] != (heads, width) or pages.v.shape[3] != width:
                found = list(pages.k.shape[1::2])
                raise InputError(f"'{name}' holds {found} heads and channels; [{heads}, {width}] is needed.")
        self.check_tables(sequences)


class PlainLatents(Plain[RowPages]):
    """The plain latents of one layer's coded pages. Their rotated keys are those beside the codes."""

    def check(self, width: int, sequences: int) -> None:
        """Refuse pages of another shape."""
        for name, pages in self.named:
            if pages.rows.shape[2] != width:
                raise InputError(f"'{name}' holds {pages.rows.shape[2]} channels; {width} are needed.")
        self.check_tables(sequences)
