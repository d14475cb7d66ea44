"""N-gram embeddings added to a residual stream of several vectors: gated values and a dilated convolution.

Each stream has its own gate on a token's value. The convolution is dilated by several tokens, so that few taps cover a long
range.
"""

from itertools import pairwise

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_floating, check_shape, op
from auraflux.ops.delta.reference_channels import FLOATS, check_starts

LEAST = 1e-6  # lower bound of the square root's argument


def _check_values(keys: Tensor, queries: Tensor, values: Tensor) -> None:
    check_dense(keys=keys, queries=queries, values=values)
    check_floating(keys=keys, queries=queries, values=values)
    check_shape("keys", keys, None, None, None)
    check_shape("queries", queries, *keys.shape)
    check_shape("values", values, keys.shape[0], keys.shape[2])


@op(check=_check_values)
def gate_values(keys: Tensor, queries: Tensor, values: Tensor) -> Tensor:
    """Multiply a token's value, for each stream, by the sigmoid of the signed root of key times query.

    keys     [T, N, H]  already normalised, one for each stream
    queries  [T, N, H]  already normalised
    values   [T, H]
    returns  [T, N, H]  in values' dtype
    """
    products = (keys.float() * queries.float()).sum(-1, keepdim=True) * keys.shape[2] ** -0.5
    gates = products.abs().clamp_min(LEAST).sqrt() * products.sign()
    return (gates.sigmoid() * values.float().unsqueeze(1)).to(values.dtype)


def _check_far_conv(x: Tensor, state: Tensor, weight: Tensor, starts: Tensor, step: int) -> None:
    check_dense(x=x, state=state, weight=weight)
    check_shape("x", x, None, None)
    check_shape("weight", weight, None, x.shape[1])
    if step < 1 or not weight.shape[0]:
        raise InputError(f"{weight.shape[0]} taps with a dilation of {step} tokens; at least 1 of each is needed.")
    check_shape("state", state, None, (weight.shape[0] - 1) * step, x.shape[1])
    check_dtype("x", x, *FLOATS)
    check_dtype("state", state, x.dtype)
    check_dtype("weight", weight, *FLOATS)
    check_starts(starts, state.shape[0], x.shape[0], x)


@op(check=_check_far_conv)
def far_conv(x: Tensor, state: Tensor, weight: Tensor, starts: Tensor, step: int) -> Tensor:
    """Convolve each channel with a dilation of `step` tokens, then apply SiLU.

    x        [T, C]
    state    [B, (K - 1) * step, C]  in x's dtype: the inputs before the first of x, oldest first; updated in place
    weight   [K, C]   the last tap multiplies the newest input
    starts   [B + 1]  int32, first token of each sequence; a sequence may be empty
    returns  [T, C]   in x's dtype
    """
    out, taps, history = torch.empty_like(x), weight.float(), state.shape[1]
    for b, (start, end) in enumerate(pairwise(starts.tolist())):
        inputs = torch.cat([state[b], x[start:end]])
        windows = torch.stack([inputs[i * step : i * step + end - start] for i in range(len(taps))])  # [K, N, C]
        out[start:end] = torch.nn.functional.silu((windows.float() * taps.unsqueeze(1)).sum(0))
        state[b] = inputs[len(inputs) - history :]
    return out
