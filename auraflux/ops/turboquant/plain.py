"""Positions that are kept as they are beside their codes: the first ones, and those next to a query.

A query at p reads the key and value at j as they are where j < `first` or p - j < `newest`, and as codes everywhere else. That
depends on no more than the two positions, so results do not depend on how tokens were cut into steps. "As they are" means not
rounded to codes, in the space of these: rotated, keys without their scale. The same query then meets both; what codes of keys
leave out besides, their centre, plain rows still have. The
latents of multi-head latent attention are kept likewise; their rotated keys are never coded.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from auraflux.errors import InputError
from auraflux.kinds import check_fields
from auraflux.ops.attention.pages import KVPages, RowPages

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
