"""Gated DeltaNet: linear attention whose state is one matrix per head, decayed and corrected at every token.
Kimi Linear's rule with per-channel decay is in `reference_channels`, Mamba-2's in `reference_scan`.

Ragged batches stack the tokens of all sequences in one axis T; those of sequence b are `starts[b]` to `starts[b + 1]`.
The state and all sums are float32 whatever the dtype of the inputs.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_floating, check_shape, op
from auraflux.ops.delta.reference_channels import FLOATS, channel_delta, channel_gates, check_starts
from auraflux.ops.delta.reference_scan import scan_gates, selective_scan
from auraflux.ops.norm.reference import check_eps, gated_rms_norm, qk_norm

__all__ = [
    "channel_delta",
    "channel_gates",
    "delta_gates",
    "delta_layer_step",
    "gated_delta_prefill",
    "gated_delta_step",
    "scan_gates",
    "selective_scan",
    "short_conv",
]

CONV_WIDTH = 4


def _check_heads(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> None:
    """Check shapes and dtypes, except how tokens are distributed over sequences."""
    check_dense(state=state, q=q, k=k, v=v, decay=decay, beta=beta)
    check_dtype("state", state, torch.float32)
    if state.dim() != 4 or q.dim() != 3:
        raise InputError(
            f"'state' has shape {list(state.shape)} and 'q' {list(q.shape)}; [B, H, K, V] and [T, Hk, K] are needed."
        )
    _, heads, key_width, value_width = state.shape
    tokens, key_heads, _ = shape = q.shape
    if key_heads == 0 or heads % key_heads:
        raise InputError(f"{heads} value heads cannot be split evenly among {key_heads} key heads.")
    gates = (tokens, heads)
    fits = shape[2] == key_width and shape == k.shape and v.shape == (*gates, value_width)
    if not (fits and decay.shape == gates and beta.shape == gates):
        check_shape("q", q, tokens, key_heads, key_width)
        check_shape("k", k, tokens, key_heads, key_width)
        check_shape("v", v, tokens, heads, value_width)
        check_shape("decay", decay, tokens, heads)
        check_shape("beta", beta, tokens, heads)
    if {q.dtype, k.dtype, v.dtype, decay.dtype, beta.dtype} != {torch.float32}:
        for name, tensor in (("q", q), ("k", k), ("v", v), ("decay", decay), ("beta", beta)):
            check_dtype(name, tensor, *FLOATS)


def _check_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> None:
    _check_heads(state, q, k, v, decay, beta)
    if state.shape[0] != q.shape[0]:
        raise InputError(
            f"'state' holds {state.shape[0]} sequences, 'q' one token each of {q.shape[0]}; the numbers must be equal."
        )


@op(origins=("gated_delta_net_step",), check=_check_step)
def gated_delta_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Decay the state, correct it towards `v` at key `k`, then read it with `q`: one token of each sequence.

    state   [B, H, K, V]  float32, updated in place
    q, k    [B, Hk, K]    already normalised; q already scaled; value head h reads key head h // (H // Hk)
    v       [B, H, V]
    decay   [B, H]        in [0, 1]
    beta    [B, H]        in [0, 1], the write strength
    returns [B, H, V]     in v's dtype
    """
    shared = state.shape[1] // q.shape[1]
    query, key = (x.float().repeat_interleave(shared, 1).unsqueeze(2) for x in (q, k))  # [B, H, 1, K]
    state *= decay.float()[..., None, None]
    correction = (v.float().unsqueeze(2) - key @ state) * beta.float()[..., None, None]  # [B, H, 1, V]
    state.addcmul_(key.mT, correction)
    return (query @ state).squeeze(2).to(v.dtype)


def _check_prefill(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor) -> None:
    _check_heads(state, q, k, v, decay, beta)
    check_starts(starts, state.shape[0], q.shape[0], state)


@op(origins=("gated_delta_net_chunkwise", "gated_delta_net_sequential"), check=_check_prefill)
def gated_delta_prefill(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor) -> Tensor:
    """Run `gated_delta_step` over all tokens of each sequence.

    state   [B, H, K, V]  float32, updated in place
    q, k    [T, Hk, K]    already normalised; q already scaled; value head h reads key head h // (H // Hk)
    v       [T, H, V]
    decay   [T, H]        in [0, 1]
    beta    [T, H]        in [0, 1], the write strength
    starts  [B + 1]       int32, where each sequence's tokens begin; a sequence may have none
    returns [T, H, V]     in v's dtype
    """
    out = torch.empty_like(v)
    for b, (start, end) in enumerate(pairwise(starts.tolist())):
        for t in range(start, end):
            token = (x[t : t + 1] for x in (q, k, v, decay, beta))
            out[t] = gated_delta_step.reference(state[b : b + 1], *token)[0]
    return out


def _check_short_conv(
    x: Tensor, state: Tensor, weight: Tensor, starts: Tensor, bias: Tensor | None = None, plain: bool = False
) -> None:
    check_dense(x=x, state=state, weight=weight, bias=bias)
    if x.dim() != 2 or state.dim() != 3:
        raise InputError(f"'x' has shape {list(x.shape)} and 'state' {list(state.shape)}; [T, C] and [B, 3, C] are needed.")
    check_shape("state", state, state.shape[0], CONV_WIDTH - 1, x.shape[1])
    check_shape("weight", weight, CONV_WIDTH, x.shape[1])
    check_dtype("x", x, *FLOATS)
    check_dtype("state", state, x.dtype)
    check_dtype("weight", weight, *FLOATS)
    if bias is not None:
        check_shape("bias", bias, x.shape[1])
        check_dtype("bias", bias, *FLOATS)
    check_starts(starts, state.shape[0], x.shape[0], x)


@op(origins=("conv1d_step", "conv1d_state_update"), check=_check_short_conv)
def short_conv(
    x: Tensor, state: Tensor, weight: Tensor, starts: Tensor, bias: Tensor | None = None, plain: bool = False
) -> Tensor:
    """Convolve each channel with its last four inputs, then apply SiLU.

    x       [T, C]
    state   [B, 3, C]  in x's dtype: the inputs before the first of x, oldest first; updated in place to the last three
    weight  [4, C]     tap 3 multiplies the newest input
    starts  [B + 1]    int32, where each sequence's tokens begin; a sequence may have none
    bias    [C]        or None, added before SiLU
    plain   no SiLU
    returns [T, C]     in x's dtype
    """
    out = torch.empty_like(x)
    taps, shift = weight.float(), 0.0 if bias is None else bias.float()
    for b, (start, end) in enumerate(pairwise(starts.tolist())):
        inputs = torch.cat([state[b], x[start:end]])
        windows = torch.stack([inputs[i : i + end - start] for i in range(CONV_WIDTH)])  # [4, N, C]
        sums = (windows.float() * taps.unsqueeze(1)).sum(0) + shift
        out[start:end] = sums if plain else torch.nn.functional.silu(sums)
        state[b] = inputs[-3:]
    return out


def _check_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> None:
    check_dense(a=a, b=b, a_log=a_log, dt_bias=dt_bias)
    if a.dim() != 2:
        raise InputError(f"'a' has shape {list(a.shape)}; [T, H] is needed.")
    check_shape("b", b, *a.shape)
    check_shape("a_log", a_log, a.shape[1])
    check_shape("dt_bias", dt_bias, a.shape[1])


@op(origins=("compute_decay_beta",), check=_check_gates)
def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the decay of a delta layer's state and its write strength from two gate projections.

    a, b    [T, H]
    a_log   [H]    logarithm of each head's rate
    dt_bias [H]
    returns (decay, beta), both [T, H] float32, in [0, 1]
    """
    step = torch.nn.functional.softplus(a.float() + dt_bias.float())
    return torch.exp(-a_log.float().exp() * step), torch.sigmoid(b.float())


def _check_layer_step(
    qkv: Tensor, z: Tensor, a: Tensor, b: Tensor, conv: Tensor, state: Tensor, taps: Tensor, a_log: Tensor, dt_bias: Tensor,
    norm: Tensor, starts: Tensor, unit_eps: float, eps: float,
) -> None:  # fmt: skip
    check_dense(qkv=qkv, z=z, a=a, b=b, conv=conv, state=state, taps=taps, a_log=a_log, dt_bias=dt_bias, norm=norm)
    check_dtype("state", state, torch.float32)
    check_shape("state", state, None, None, None, None)
    check_shape("qkv", qkv, None, None)
    (tokens, channels), (_, heads, key_width, value_width) = qkv.shape, state.shape
    if not (key_width and value_width):
        raise InputError(f"'state' has shape {list(state.shape)}; keys and values of at least one element are needed.")
    keys, rest = divmod(channels - heads * value_width, 2 * key_width)
    if keys < 1 or rest or heads % keys:
        raise InputError(
            f"'qkv' has {channels} channels; without {heads} value heads of {value_width} they do not hold queries and keys "
            f"of {key_width} for a number of heads that divides {heads}."
        )
    check_shape("state", state, tokens, heads, key_width, value_width)
    check_shape("z", z, tokens, heads, value_width)
    check_shape("a", a, tokens, heads)
    check_shape("b", b, tokens, heads)
    check_shape("conv", conv, tokens, CONV_WIDTH - 1, channels)
    check_shape("taps", taps, CONV_WIDTH, channels)
    check_shape("a_log", a_log, heads)
    check_shape("dt_bias", dt_bias, heads)
    check_shape("norm", norm, value_width)
    for name, tensor in (("qkv", qkv), ("z", z), ("a", a), ("b", b), ("taps", taps)):
        check_dtype(name, tensor, *FLOATS)
    check_dtype("conv", conv, qkv.dtype)
    # everything its steps check, since the first of them already write
    check_floating(norm=norm)
    check_eps(unit_eps)
    check_eps(eps)
    check_starts(starts, tokens, tokens, qkv)


@op(check=_check_layer_step)
def delta_layer_step(
    qkv: Tensor, z: Tensor, a: Tensor, b: Tensor, conv: Tensor, state: Tensor, taps: Tensor, a_log: Tensor, dt_bias: Tensor,
    norm: Tensor, starts: Tensor, unit_eps: float, eps: float,
) -> Tensor:  # fmt: skip
    """Run one token of each sequence through a delta layer, from its input projections to the input of its output projection.

    qkv      [B, C]        queries and keys of Hk heads, then values of H heads: C = 2 Hk K + H V
    z        [B, H, V]     gates the result
    a, b     [B, H]        see `delta_gates`
    conv     [B, 3, C]     in qkv's dtype, see `short_conv`; updated in place
    state    [B, H, K, V]  float32, see `gated_delta_step`; updated in place
    taps     [4, C]
    a_log, dt_bias [H]
    norm     [V]           see `gated_rms_norm`
    starts   [B + 1]       int32, 0 to B
    unit_eps, eps          of the norm of queries and keys, see `qk_norm`, and of the result
    returns  [B, H, V]     in qkv's dtype
    """
    steps = [step.reference for step in LAYER_STEPS]
    return layer_step_by(steps, qkv, z, a, b, conv, state, taps, a_log, dt_bias, norm, starts, unit_eps, eps)


LAYER_STEPS = (delta_gates, short_conv, qk_norm, gated_delta_step, gated_rms_norm)


def layer_step_by(
    steps: Sequence[Callable[..., Any]], qkv: Tensor, z: Tensor, a: Tensor, b: Tensor, conv: Tensor, state: Tensor,
    taps: Tensor, a_log: Tensor, dt_bias: Tensor, norm: Tensor, starts: Tensor, unit_eps: float, eps: float,
) -> Tensor:  # fmt: skip
    """Run `delta_layer_step` with the given implementations of `LAYER_STEPS`."""
    gates, convolve, unit, update, gated_norm = steps
    tokens, heads, key_width, value_width = state.shape
    decay, beta = gates(a, b, a_log, dt_bias)
    keys = (qkv.shape[1] - heads * value_width) // 2
    parts = convolve(qkv, conv, taps, starts).split_with_sizes((keys, keys, heads * value_width), 1)
    q, k = (part.contiguous().view(tokens, -1, key_width) for part in parts[:2])
    v = parts[2].contiguous().view(tokens, heads, value_width)
    q, k = unit(q, k, unit_eps)
    return gated_norm(update(state, q, k, v, decay, beta), z, norm, eps)
