"""Arguments of the ops on codes, as the route tables receive them."""

from typing import NamedTuple

from torch import Tensor

from auraflux.ops.attention.cuda.mla_rope_append import Rotation
from auraflux.ops.turboquant.pages import CodePages, LatentCodes


class Attend(NamedTuple):
    """Attention from queries [T, H, D] to quantized keys and values."""

    q: Tensor
    pages: CodePages
    starts: Tensor
    scale: float
    window: int | None
    sinks: Tensor | None
    softcap: float | None


class AttendLatent(NamedTuple):
    """Attention from queries [T, H, C] and their RoPE part [T, H, R] to quantized latents."""

    q: Tensor
    q_rope: Tensor
    pages: LatentCodes
    starts: Tensor
    scale: float
    sinks: Tensor | None = None


class Append(NamedTuple):
    """Keys and values [T, Hkv, D] to encode into their pages."""

    k: Tensor
    v: Tensor
    pages: CodePages
    starts: Tensor


class RopeAppend(NamedTuple):
    """Queries, keys and values of new tokens: RMS norm where norms are given, RoPE, then encode keys and values."""

    q: Tensor
    k: Tensor
    v: Tensor
    pages: CodePages
    starts: Tensor
    inv_freq: Tensor
    positions: Tensor
    norms: tuple[Tensor, Tensor] | None
    eps: float
    mscale: float
    interleaved: bool


class RopeAppendAttend(NamedTuple):
    """New tokens to append, and the attention of their queries."""

    append: RopeAppend
    scale: float
    window: int | None
    sinks: Tensor | None
    softcap: float | None

    def attend(self, q: Tensor) -> Attend:
        return Attend(q, self.append.pages, self.append.starts, self.scale, self.window, self.sinks, self.softcap)


class RopeAppendLatent(NamedTuple):
    """New tokens of MLA: normalise and encode latents of kv [T, C + R], apply RoPE to its keys and to q [T, H * (nope + R)].

    rotation  inverse frequencies, positions, mscale, whether RoPE pairs are interleaved
    """

    q: Tensor
    kv: Tensor
    heads: int
    nope: int
    pages: LatentCodes
    starts: Tensor
    norm: Tensor
    eps: float
    rotation: Rotation
