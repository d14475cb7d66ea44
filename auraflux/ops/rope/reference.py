"""Rotary position embedding. The frequencies come from `frequencies.py`."""

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_floating, check_heads, check_shape, op
from auraflux.ops.norm.reference import check_eps, rms_norm


def _check_rope(x: Tensor, inv_freq: Tensor, positions: Tensor, mscale: float = 1.0, interleaved: bool = False) -> None:
    check_dense(x=x, inv_freq=inv_freq, positions=positions)
    check_shape("x", x, None, None, None)
    check_rope(x, inv_freq, positions, per_frequency=True)


def check_rope(x: Tensor, inv_freq: Tensor, positions: Tensor, per_frequency: bool = False) -> None:
    """Check the arguments of a rotation; `per_frequency` if a token may have a position for each frequency."""
    check_floating(x=x)
    check_shape("inv_freq", inv_freq, None)
    each = inv_freq.shape if per_frequency and positions.dim() == 2 else ()
    check_shape("positions", positions, x.shape[0], *each)
    check_dtype("inv_freq", inv_freq, torch.float32)
    check_dtype("positions", positions, torch.int32, torch.int64)
    if 2 * inv_freq.shape[0] > x.shape[2]:
        raise InputError(f"{inv_freq.shape[0]} frequencies rotate {2 * inv_freq.shape[0]} channels; x has {x.shape[2]}.")


@op(origins=("rope_n_tokens", "yarn_rope_apply"), check=_check_rope)
def rope(x: Tensor, inv_freq: Tensor, positions: Tensor, mscale: float = 1.0, interleaved: bool = False) -> Tensor:
    """Rotate pairs of the first R channels of each head by angles that grow with the token's position.

    x           [T, H, D]
    inv_freq    [R/2]      float32, radians per position; R <= D, the channels after R stay
    positions   [T]        int32 or int64; [T, R/2] for multimodal RoPE, where each frequency has its own
    mscale                 multiplies cosine and sine
    interleaved            pairs are (2i, 2i + 1); otherwise (i, i + R/2)
    returns     [T, H, D]  in x's dtype
    """
    half = inv_freq.shape[0]
    # the angle is rounded to float32, as checkpoints were trained; its sine and cosine are computed exactly for any size
    places = positions.float()
    angles = ((places if places.dim() == 2 else places[:, None]) * inv_freq).double()
    cosine, sine = (angles.cos().float() * mscale)[:, None], (angles.sin().float() * mscale)[:, None]
    rotated, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack((a * cosine - b * sine, b * cosine + a * sine), -1).flatten(-2)
    else:
        a, b = rotated[..., :half], rotated[..., half:]
        rotated = torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1)
    return torch.cat((rotated.to(x.dtype), rest), -1)


def _check_grow_queries(q: Tensor, positions: Tensor, slope: float, span: int, ahead: int = 0) -> None:
    check_shape("q", q, None, None, None)
    check_heads("q", q)
    # of strided heads, a single one is dense
    check_dense(q=q if q.is_contiguous() else q[:1, :1], positions=positions)
    check_floating(q=q)
    check_shape("positions", positions, q.shape[0])
    check_dtype("positions", positions, torch.int32, torch.int64)
    if span < 1:
        raise InputError(f"span is {span}; at least one position is needed.")
    if ahead < 0:
        raise InputError(f"ahead is {ahead}; positions are counted from 0 or later.")


@op(check=_check_grow_queries)
def grow_queries(q: Tensor, positions: Tensor, slope: float, span: int, ahead: int = 0) -> Tensor:
    """Multiply the queries of a token by 1 + slope * log(1 + n), n being the number of complete spans before its position.

    q          [T, H, D]  its heads may be strided
    positions  [T]        int32 or int64
    ahead      added to positions
    returns    [T, H, D]  in q's dtype
    """
    spans = ((positions + ahead) // span).float()
    return (q.float() * (1 + slope * torch.log(1 + spans))[:, None, None]).to(q.dtype).contiguous()


def check_norm_rope(
    q: Tensor,
    k: Tensor,
    inv_freq: Tensor,
    positions: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    mscale: float = 1.0,
    interleaved: bool = False,
) -> None:
    check_shape("q", q, None, None, None)
    check_heads("q", q)
    check_dense(k=k, inv_freq=inv_freq, positions=positions)
    check_rope(q, inv_freq, positions, per_frequency=True)
    check_eps(eps)
    check_shape("k", k, q.shape[0], None, q.shape[2])
    check_dtype("k", k, q.dtype)
    for name, weight in zip(("norms[0]", "norms[1]"), norms or (), strict=False):
        check_dense(k=k, weight=weight)
        check_shape(name, weight, q.shape[2])


@op(check=check_norm_rope)
def norm_rope(
    q: Tensor,
    k: Tensor,
    inv_freq: Tensor,
    positions: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    mscale: float = 1.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Normalise each head of queries and keys where they have norms, then rotate them, see `rope`.

    q           [T, Hq, D]  its heads may be strided, see `split_q_gate`
    k           [T, Hk, D]
    norms       two of [D], the weights of the queries' and the keys' RMS norm, or None
    returns     (queries, keys), of unchanged shape
    """
    if norms is not None:
        q, k = rms_norm.reference(q, norms[0], eps), rms_norm.reference(k, norms[1], eps)
    return rope.reference(q, inv_freq, positions, mscale, interleaved), rope.reference(
        k, inv_freq, positions, mscale, interleaved
    )
