"""Rows of keys and values, dequantized or in full precision, and attention of the reference to them."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from auraflux.ops.attention.pages import rows_of
from auraflux.ops.turboquant.codebook import Codebook, codebook
from auraflux.ops.turboquant.full_precision import FullPrecisionKV
from auraflux.ops.turboquant.pages import CodePages, unpack
from auraflux.ops.turboquant.reference_codec import rotate


@dataclass(frozen=True)
class Rows:
    """Rotated keys and values at positions [t] of a sequence: [t, Hkv, D] to be multiplied by norms [t, Hkv].

    full_precision  not dequantized from codes
    """

    positions: Tensor
    k: Tensor
    k_norms: Tensor
    v: Tensor
    v_norms: Tensor
    full_precision: bool

    def sums(self, weights: Tensor) -> Tensor:
        """Sum values by weights: [n, Hkv, g, t] -> [n, Hkv, g, D]."""
        # 0 times NaN is NaN: masked values must not contribute
        weighed = torch.where(weights == 0, 0.0, weights * self.v_norms.T.unsqueeze(1))
        if torch.isfinite(self.v).all():
            return torch.einsum("nhgt,thd->nhgd", weighed, self.v)
        each = weighed.unsqueeze(-1) * self.v.transpose(0, 1).unsqueeze(1)
        return each.masked_fill(weights.unsqueeze(-1) == 0, 0.0).sum(-2)


def coded_rows(pages: CodePages, b: int, first: int, last: int) -> Rows:
    """Dequantize the codes at positions [first, last) of a sequence."""
    page, slot = pages.rows_of(b, first, last)

    def levels(codes: Tensor, bits: int, book: Codebook | None) -> Tensor:
        return codebook(bits, pages.width, codes.device, book)[unpack(codes[page, :, slot], bits, pages.width)]

    return Rows(
        torch.arange(first, last, device=page.device),
        levels(pages.key_codes, pages.key_bits, pages.key_book),
        pages.key_norms[page, :, slot],
        levels(pages.value_codes, pages.value_bits, pages.value_book),
        pages.value_norms[page, :, slot],
        full_precision=False,
    )


def full_precision_rows(full_precision: FullPrecisionKV, b: int, new: int, length: int) -> Rows:
    """Return the full-precision rows that the last `new` positions of a sequence may read."""
    spans = (
        (full_precision.head, 0, min(full_precision.sink_tokens, length)),
        (full_precision.recent, max(full_precision.sink_tokens, length - new - full_precision.recent_window + 1), length),
    )
    k, v, positions = [], [], []
    for region, first, last in spans:
        if region is not None and first < last:
            page, slot = rows_of(region, b, first, last)
            k.append(region.k[page, :, slot].float())
            v.append(region.v[page, :, slot].float())
            positions.append(torch.arange(first, last, device=page.device))
    keys = torch.cat(k)
    ones = torch.ones(keys.shape[:2], device=keys.device)
    return Rows(torch.cat(positions), keys, ones, torch.cat(v), ones, full_precision=True)


@dataclass(frozen=True)
class Query:
    """Queries [T, Hq, D], not rotated, and the settings of their scores."""

    q: Tensor
    pages: CodePages
    scale: float
    softcap: float | None

    @cached_property
    def rotated(self) -> Tensor:
        calibration = self.pages.calibration
        return rotate.reference(self.q if calibration is None else self._by_head(self.q, calibration.scale), self.pages.seed)

    def attend(self, mine: slice, rows: Rows, seen: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
        """Attend from some of the queries to the rows visible to each, without the final division."""
        products = torch.einsum("nhgd,thd->nhgt", self._grouped(self.rotated[mine]), rows.k)
        scores = (products * rows.k_norms.T.unsqueeze(1)).flatten(1, 2)
        if self.pages.calibration is not None and not rows.full_precision:
            centres = self.pages.calibration.centres(rows.positions).float()
            scores = scores + torch.einsum("nhgd,thd->nhgt", self._grouped(self.q[mine]), centres).flatten(1, 2)
        scores = scores * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - top.masked_fill(top == -torch.inf, 0.0))
        share = weights.sum(-1)
        # a skipped value still counts in the sum
        weights = weights.masked_fill(weights < threshold * share.unsqueeze(-1), 0.0)
        return rows.sums(self._grouped(weights)).flatten(1, 2), top.squeeze(-1), share

    def _grouped(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.pages.heads, -1))

    def _by_head(self, q: Tensor, scale: Tensor) -> Tensor:
        return (self._grouped(q) * scale.unsqueeze(1)).flatten(1, 2)
