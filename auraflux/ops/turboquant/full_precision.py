"""Sink tokens and recent window of a quantized cache, stored in full precision as well.

A query at p reads the key and value at j in full precision where j < `sink_tokens` or p - j < `recent_window`, and as codes
everywhere else. That depends on the two positions alone, so results do not depend on the chunks of prefill. Full-precision rows
are in the space of the codes: rotated, and keys without their scale, so that one query serves both. Unlike codes, they include
the centre of the key calibration. Latents of MLA have such rows too; their RoPE keys are never quantized.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops.attention.pages import KVPages, RowPages
from auraflux.validation import check_fields

PagesT = TypeVar("PagesT", KVPages, RowPages)


@dataclass(frozen=True, eq=False)
class FullPrecisionRows(Generic[PagesT]):
    """Full-precision rows of one layer.

    head           pages of each sequence's sink tokens, as many as its table holds; None for none
    recent         pages of the recent window; None for none
    recent_window  positions up to and including a query's that are read from `recent`
    """

    head: PagesT | None
    recent: PagesT | None
    recent_window: int

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.recent is None) != (self.recent_window == 0) or self.recent_window < 0:
            raise InputError(
                f"'recent_window' is {self.recent_window}; a positive number is needed with pages of recent positions, else 0."
            )

    @property
    def sink_tokens(self) -> int:
        """Number of sink tokens."""
        return 0 if self.head is None else self.head.table.shape[1] * self.head.pool[1]

    @property
    def named(self) -> list[tuple[str, PagesT]]:
        """Pages that are present, by name."""
        return [(name, pages) for name, pages in (("head", self.head), ("recent", self.recent)) if pages is not None]

    def covers(self, queries: Tensor, positions: Tensor) -> Tensor:
        """Return which positions are read in full precision by queries at `queries`, if visible."""
        return (positions < self.sink_tokens) | (queries - positions < self.recent_window)

    def check_tables(self, sequences: int) -> None:
        """Refuse tables of another number of sequences."""
        for name, pages in self.named:
            if len(pages.table) != sequences:
                raise InputError(f"'{name}' has tables of {len(pages.table)} sequences; the codes have {sequences}.")


class FullPrecisionKV(FullPrecisionRows[KVPages]):
    """Full-precision keys and values of one layer."""

    def check(self, heads: int, width: int, sequences: int) -> None:
        """Refuse pages of another shape."""
        for name, pages in self.named:
            if pages.k.shape[1::2] != (heads, width) or pages.v.shape[3] != width:
                found = list(pages.k.shape[1::2])
                raise InputError(f"'{name}' holds {found} heads and channels; [{heads}, {width}] is needed.")
        self.check_tables(sequences)


class FullPrecisionLatents(FullPrecisionRows[RowPages]):
    """Full-precision latents of one layer; their RoPE keys are stored with the codes."""

    def check(self, width: int, sequences: int) -> None:
        """Refuse pages of another shape."""
        for name, pages in self.named:
            if pages.rows.shape[2] != width:
                raise InputError(f"'{name}' holds {pages.rows.shape[2]} channels; {width} are needed.")
        self.check_tables(sequences)
