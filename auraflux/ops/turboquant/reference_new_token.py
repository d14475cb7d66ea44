"""Attention of new tokens that are not in the cache yet: append them, then attend, as one op."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from auraflux.ops._dispatch import check_dense, op
from auraflux.ops.turboquant.pages import CodePages
from auraflux.ops.turboquant.reference import (
    check_attention_options,
    check_rope_append_codes,
    rope_append_codes,
    turboquant_attention,
)


@dataclass(frozen=True)
class NormRope:
    """Norm and RoPE of new tokens, see `norm_rope`."""

    inv_freq: Tensor
    positions: Tensor
    norms: tuple[Tensor, Tensor] | None
    eps: float
    mscale: float
    interleaved: bool

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.inv_freq, self.positions, self.norms, self.eps, self.mscale, self.interleaved


@dataclass(frozen=True)
class AttentionOptions:
    """Scores and visible keys of attention, see `turboquant_attention`."""

    scale: float
    window: int | None = None
    sinks: Tensor | None = None
    softcap: float | None = None
    threshold: float = 0.0
    ends: Tensor | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.scale, self.window, self.sinks, self.softcap, self.threshold, self.ends


def _check_rope_append_attention(
    q: Tensor, k: Tensor, v: Tensor, pages: CodePages, starts: Tensor, rotation: NormRope, options: AttentionOptions
) -> None:
    check_rope_append_codes(q, k, v, pages, starts, *rotation.arguments)
    check_dense(k=k, sinks=options.sinks, ends=options.ends)
    check_attention_options(q, pages, starts, *options.arguments[1:])


@op(check=_check_rope_append_attention)
def rope_append_attention(
    q: Tensor, k: Tensor, v: Tensor, pages: CodePages, starts: Tensor, rotation: NormRope, options: AttentionOptions
) -> Tensor:
    """Normalise and rotate the queries and keys of new tokens, store keys and values, then attend.

    q, k, v, pages, starts  see `rope_append_codes`
    returns  [T, Hq, D]  in q's dtype
    """
    rotated = rope_append_codes(q, k, v, pages, starts, *rotation.arguments)
    return turboquant_attention(rotated, pages, starts, *options.arguments)
