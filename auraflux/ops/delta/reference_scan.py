"""Mamba-2's rule: a decayed state with additive writes."""

from itertools import pairwise

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_shape, op
from auraflux.ops.delta.reference_channels import FLOATS, check_starts


def _check_scan_gates(dt: Tensor, a_log: Tensor, dt_bias: Tensor) -> None:
    check_dense(dt=dt, a_log=a_log, dt_bias=dt_bias)
    check_shape("dt", dt, None, None)
    check_shape("a_log", a_log, dt.shape[1])
    check_shape("dt_bias", dt_bias, dt.shape[1])
    for name, tensor in (("dt", dt), ("a_log", a_log), ("dt_bias", dt_bias)):
        check_dtype(name, tensor, *FLOATS)


@op(check=_check_scan_gates)
def scan_gates(dt: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the decay of each head's state and its write strength from a projection.

    dt       [T, H]
    a_log    [H]    logarithm of each head's rate
    dt_bias  [H]
    returns  (decay, step), both [T, H] float32; decay in [0, 1]
    """
    step = torch.nn.functional.softplus(dt.float() + dt_bias.float())
    return torch.exp(-a_log.float().exp() * step), step


def groups_of(state: Tensor, channels: int) -> int:
    """Return the number of key and query groups of a token."""
    _, heads, key_width, value_width = state.shape
    groups, rest = divmod(channels - heads * value_width, 2 * key_width) if key_width else (0, 0)
    if groups < 1 or rest or heads % groups:
        raise InputError(
            f"a token has {channels} channels; without {heads} values of {value_width} they do not hold keys and queries of "
            f"{key_width} for a number of groups that divides {heads}."
        )
    return groups


def _check_selective_scan(state: Tensor, xbc: Tensor, decay: Tensor, step: Tensor, skip: Tensor, starts: Tensor) -> None:
    check_dense(state=state, xbc=xbc, decay=decay, step=step, skip=skip)
    check_dtype("state", state, torch.float32)
    check_shape("state", state, None, None, None, None)
    check_shape("xbc", xbc, None, None)
    (sequences, heads, _, _), (tokens, channels) = state.shape, xbc.shape
    groups_of(state, channels)
    check_shape("decay", decay, tokens, heads)
    check_shape("step", step, tokens, heads)
    check_shape("skip", skip, heads)
    for name, tensor in (("xbc", xbc), ("decay", decay), ("step", step), ("skip", skip)):
        check_dtype(name, tensor, *FLOATS)
    check_starts(starts, sequences, tokens, state)


@op(check=_check_selective_scan)
def selective_scan(state: Tensor, xbc: Tensor, decay: Tensor, step: Tensor, skip: Tensor, starts: Tensor) -> Tensor:
    """Run a state through tokens: decay it, write step * value at the key, read it with the query.

    state   [B, H, K, V]  float32, updated in place
    xbc     [T, C]        values of H heads, then keys and then queries of G groups: C = H V + 2 G K; head h has those of
                          group h // (H // G)
    decay   [T, H]        in [0, 1]
    step    [T, H]        the write strength
    skip    [H]           factor of a token's value in its output
    starts  [B + 1]       int32, where each sequence's tokens begin; a sequence may have none
    returns [T, H V]      in xbc's dtype
    """
    _, heads, key_width, value_width = state.shape
    groups = groups_of(state, xbc.shape[1])
    parts = xbc.float().split_with_sizes((heads * value_width, groups * key_width, groups * key_width), 1)
    values = parts[0].unflatten(1, (heads, value_width))
    keys, queries = (part.unflatten(1, (groups, key_width)).repeat_interleave(heads // groups, 1) for part in parts[1:])
    out = torch.empty_like(values)
    for b, (start, end) in enumerate(pairwise(starts.tolist())):
        memory = state[b]
        for t in range(start, end):
            memory *= decay[t].float()[:, None, None]
            memory += keys[t][..., None] * (values[t] * step[t].float()[:, None])[:, None]
            out[t] = torch.einsum("hk,hkv->hv", queries[t], memory) + skip.float()[:, None] * values[t]
    return out.flatten(1).to(xbc.dtype)
