"""Kimi Linear's delta rule: Gated DeltaNet with a separate decay for every key channel."""

from itertools import pairwise

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_shape, op

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_starts(starts: Tensor, sequences: int, tokens: int, near: Tensor) -> None:
    """Check that `starts` partitions the tokens into sequences."""
    check_dtype("starts", starts, torch.int32)
    check_shape("starts", starts, sequences + 1)
    if starts.device.type != "cpu" and starts.device != near.device:
        raise InputError(f"'starts' is on {starts.device}, the first argument on {near.device}. Move one of them.")
    check_dense(starts=starts)
    if not starts.is_cpu:
        # reading them would synchronize the device or break CUDA graph capture; kernels clamp to the token count
        return
    places = starts.tolist()
    if places[0] != 0 or places[-1] != tokens or places != sorted(places):
        raise InputError(f"'starts' is {places}; it must increase from 0 to the number of tokens, {tokens}.")


def _check_channel_gates(f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, floor: float | None = None) -> None:
    if floor is not None and not floor < 0:
        raise InputError(f"floor is {floor}; the logarithm of a decay must be negative.")
    check_dense(f=f, b=b, a_log=a_log, dt_bias=dt_bias)
    check_shape("f", f, None, None, None)
    check_shape("b", b, *f.shape[:2])
    check_shape("a_log", a_log, f.shape[1])
    check_shape("dt_bias", dt_bias, *f.shape[1:])
    for name, tensor in (("f", f), ("b", b), ("a_log", a_log), ("dt_bias", dt_bias)):
        check_dtype(name, tensor, *FLOATS)


@op(check=_check_channel_gates)
def channel_gates(f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, floor: float | None = None) -> tuple[Tensor, Tensor]:
    """Compute the decay of each state channel and the write strength from two gate projections.

    f        [T, H, K]
    b        [T, H]
    a_log    [H]        logarithm of each head's rate
    dt_bias  [H, K]
    floor    of the decay's logarithm, below 0: it is floor * sigmoid(rate * x), not -rate * softplus(x)
    returns  (decay [T, H, K], beta [T, H]), float32, in [0, 1]
    """
    x, rate = f.float() + dt_bias.float(), a_log.float().exp()[:, None]
    found = -rate * torch.nn.functional.softplus(x) if floor is None else floor * torch.sigmoid(rate * x)
    return torch.exp(found), torch.sigmoid(b.float())


def _check_channel_delta(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor) -> None:
    check_dense(state=state, q=q, k=k, v=v, decay=decay, beta=beta)
    check_dtype("state", state, torch.float32)
    check_shape("state", state, None, None, None, None)
    _, heads, key_width, value_width = state.shape
    check_shape("q", q, None, heads, key_width)
    tokens = q.shape[0]
    check_shape("k", k, *q.shape)
    check_shape("v", v, tokens, heads, value_width)
    check_shape("decay", decay, *q.shape)
    check_shape("beta", beta, tokens, heads)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("decay", decay), ("beta", beta)):
        check_dtype(name, tensor, *FLOATS)
    check_starts(starts, state.shape[0], tokens, state)


@op(check=_check_channel_delta)
def channel_delta(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor) -> Tensor:
    """Run a state through tokens: decay each key channel, correct the state towards `v` at key `k`, read it with `q`.

    state   [B, H, K, V]  float32, updated in place
    q, k    [T, H, K]     already normalised; q already scaled
    v       [T, H, V]
    decay   [T, H, K]     in [0, 1]
    beta    [T, H]        in [0, 1], the write strength
    starts  [B + 1]       int32, where each sequence's tokens begin; a sequence may have none
    returns [T, H, V]     in v's dtype
    """
    out = torch.empty_like(v)
    for memory, (start, end) in zip(state, pairwise(starts.tolist()), strict=True):
        for t in range(start, end):
            key = k[t].float()
            memory *= decay[t].float()[..., None]
            correction = (v[t].float() - torch.einsum("hk,hkv->hv", key, memory)) * beta[t].float()[:, None]
            memory += key[..., None] * correction[:, None]
            out[t] = torch.einsum("hk,hkv->hv", q[t].float(), memory).to(v.dtype)
    return out
