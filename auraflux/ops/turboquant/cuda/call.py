"""What the ops on codes ask of the kernels, where there is a choice between some."""

from typing import NamedTuple

from torch import Tensor

from auraflux.ops.attention.cuda.mla_rope_append import Rotation
from auraflux.ops.turboquant.pages import CodePages, LatentCodes


class Attend(NamedTuple):
    """Queries [T, H, D] attend to coded keys and values."""

    q: Tensor
    pages: CodePages
    starts: Tensor
    scale: float
    window: int | None
    sinks: Tensor | None
    softcap: float | None


class AttendLatent(NamedTuple):
    """Queries [T, H, C] and rotated ones [T, H, R] attend to coded latents."""

    q: Tensor
    q_rope: Tensor
    pages: LatentCodes
    starts: Tensor
    scale: float


class Append(NamedTuple):
    """Keys and values [T, Hkv, D] are coded into their pages."""

    k: Tensor
    v: Tensor
    pages: CodePages
    starts: Tensor


class RopeAppend(NamedTuple):
    """Queries and keys are first normalised, where there are norms, and rotated by position."""

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


class RopeAppendLatent(NamedTuple):
    """Latents [T, C] of kv [T, C + R] are normalised and coded, its keys and the ends of q [T, H * (nope + R)] rotated.

    rotation  frequencies, positions, the rotation's scale, and whether neighbours are rotated together
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
