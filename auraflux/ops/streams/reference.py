"""Hyper-connections: a residual stream of several vectors per token, with weights computed from the streams themselves.

The input of a sublayer is a weighted sum of the streams. Its output is added to all of them, each with its own weight, after
the streams were mixed by a doubly stochastic matrix, so that repeated mixing does not grow. All weights come from `mixes`,
products of the streams with a learned matrix.

Hunyuan 4's streams do not mix. Qwen4 normalises each stream, takes the mean of the streams gated by channel, and does not mix.
"""

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_floating, check_shape, op
from auraflux.ops.norm.reference import check_eps

MOST_ROUNDS = 1000  # of Sinkhorn normalisation
MOST_STREAMS = 64


def _check_mixes(x: Tensor, mixes: Tensor, base: Tensor, scale: Tensor, width: int, scales: int) -> None:
    check_dense(x=x, mixes=mixes, base=base, scale=scale)
    check_floating(x=x)
    for name, tensor in (("mixes", mixes), ("base", base), ("scale", scale)):
        check_dtype(name, tensor, torch.float32)
    check_shape("mixes", mixes, x.shape[0], width)
    check_shape("base", base, width)
    check_shape("scale", scale, scales)


def _check_start(x: Tensor, count: int) -> None:
    check_dense(x=x)
    check_floating(x=x)
    check_shape("x", x, None, None)
    if not 1 <= count <= MOST_STREAMS:
        raise InputError(f"count is {count}; it must be from 1 to {MOST_STREAMS}.")


@op(check=_check_start)
def start_streams(x: Tensor, count: int) -> Tensor:
    """Start `count` streams of each token, all with the same values.

    x        [T, H]
    returns  [T, N, H]  in x's dtype
    """
    return x[:, None].repeat(1, count, 1)


def _check_collapse(x: Tensor, mixes: Tensor, base: Tensor, scale: Tensor, eps: float, rounds: int) -> None:
    check_shape("x", x, None, None, None)
    _check_mixes(x, mixes, base, scale, x.shape[1] * (x.shape[1] + 2), 3)
    if not 1 <= rounds <= MOST_ROUNDS:
        raise InputError(f"rounds is {rounds}; it must be from 1 to {MOST_ROUNDS}.")


@op(check=_check_collapse)
def collapse_streams(
    x: Tensor, mixes: Tensor, base: Tensor, scale: Tensor, eps: float, rounds: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the streams of each token with its own weights, and return the weights for writing and mixing.

    x        [T, N, H]
    mixes    [T, N + N + N * N]  float32: for reading, for writing, and for mixing, from which stream to which
    base     [N + N + N * N]     float32, added to the mixes times scale [3], one for each of the three
    eps      added to weights and to the sums they are divided by
    rounds   of Sinkhorn normalisation: columns, then rows, are scaled to sum to one, ending with columns
    returns  the sum [T, H] in x's dtype, and float32 weights for writing [T, N] and for mixing [T, N, N]
    """
    n = x.shape[1]
    parts = zip(mixes.split([n, n, n * n], -1), base.split([n, n, n * n]), scale, strict=True)
    read, write, mix = (mixed * factor + offset for mixed, offset, factor in parts)
    mix = mix.unflatten(1, (n, n)).softmax(-1) + eps
    mix = mix / (mix.sum(1, keepdim=True) + eps)
    for _ in range(rounds - 1):
        mix = mix / (mix.sum(2, keepdim=True) + eps)
        mix = mix / (mix.sum(1, keepdim=True) + eps)
    return _weighted(x, read.sigmoid() + eps), 2 * write.sigmoid(), mix


def _check_read(x: Tensor, mixes: Tensor, base: Tensor, scale: Tensor, eps: float, most: float) -> None:
    check_shape("x", x, None, None, None)
    _check_mixes(x, mixes, base, scale, 2 * x.shape[1], 2)


@op(check=_check_read)
def read_streams(x: Tensor, mixes: Tensor, base: Tensor, scale: Tensor, eps: float, most: float) -> tuple[Tensor, Tensor]:
    """Sum the streams of each token with its own weights, and return the weights for writing to streams that do not mix.

    x        [T, N, H]
    mixes    [T, N + N]  float32: for reading, and for writing
    base     [N + N]     float32, added to the mixes times scale [2], one for each of the two
    eps      added to weights
    most     the largest weight for writing, less eps
    returns  the sum [T, H] in x's dtype, and float32 weights for writing [T, N]
    """
    n = x.shape[1]
    read, write = (mixes.unflatten(1, (2, n)) * scale[:, None] + base.view(2, n)).sigmoid().unbind(1)
    return _weighted(x, read + eps), most * write + eps


def _check_sum(x: Tensor, mixes: Tensor, base: Tensor, scale: Tensor, eps: float) -> None:
    check_shape("x", x, None, None, None)
    _check_mixes(x, mixes, base, scale, x.shape[1], 1)


@op(check=_check_sum)
def sum_streams(x: Tensor, mixes: Tensor, base: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Sum the streams of each token with its own weights, after the last layer.

    x        [T, N, H]
    mixes    [T, N]  float32
    base     [N]     float32, added to the mixes times scale [1]
    eps      added to the weights
    returns  [T, H]  in x's dtype
    """
    return _weighted(x, (mixes * scale + base).sigmoid() + eps)


def _weighted(x: Tensor, weights: Tensor) -> Tensor:
    return (weights[..., None] * x.float()).sum(1).to(x.dtype)


def _check_expand(x: Tensor, found: Tensor, write: Tensor, mix: Tensor | None = None) -> None:
    check_dense(x=x, found=found, write=write, mix=mix)
    check_floating(x=x, found=found)
    check_shape("x", x, None, None, None)
    tokens, n, hidden = x.shape
    check_shape("found", found, tokens, hidden)
    check_shape("write", write, tokens, n)
    check_dtype("write", write, torch.float32)
    if mix is not None:
        check_shape("mix", mix, tokens, n, n)
        check_dtype("mix", mix, torch.float32)


@op(check=_check_expand)
def expand_streams(x: Tensor, found: Tensor, write: Tensor, mix: Tensor | None = None) -> Tensor:
    """Mix the streams of each token, and add a sublayer's output to all of them.

    x        [T, N, H]
    found    [T, H]
    write    [T, N]     float32
    mix      [T, N, N]  float32; stream j goes to stream k by mix[j, k]; None where streams do not mix
    returns  [T, N, H]  in x's dtype
    """
    mixed = x.float() if mix is None else torch.einsum("tjk,tjh->tkh", mix, x.float())
    return (write[..., None] * found.float()[:, None] + mixed).to(x.dtype)


def _check_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    check_dense(x=x, weight=weight)
    check_floating(x=x, weight=weight)
    check_eps(eps)
    check_shape("x", x, None, None, None)
    check_shape("weight", weight, *x.shape[1:])
    if not x.shape[2]:
        raise InputError(f"'x' has shape {list(x.shape)}; rows of at least one element are needed.")


@op(check=_check_norm)
def norm_streams(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each stream to unit root mean square, then by its own weight.

    x        [T, N, H]
    weight   [N, H]
    returns  [T, N, H]  in x's dtype
    """
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _check_gate(x: Tensor, gates: Tensor) -> None:
    check_dense(x=x, gates=gates)
    check_floating(x=x, gates=gates)
    check_shape("x", x, None, None, None)
    check_shape("gates", gates, *x.shape)
    if not x.shape[1]:
        raise InputError(f"'x' has shape {list(x.shape)}; at least one stream is needed.")


@op(check=_check_gate)
def gate_streams(x: Tensor, gates: Tensor) -> Tensor:
    """Return the mean of the streams, each channel multiplied by the sigmoid of its gate.

    x        [T, N, H]
    gates    [T, N, H]
    returns  [T, H]  in x's dtype
    """
    return (gates.float().sigmoid() * x.float()).mean(1).to(x.dtype)


def _check_write(x: Tensor, found: Tensor, mixes: Tensor) -> None:
    check_dense(x=x, found=found, mixes=mixes)
    check_floating(x=x, found=found, mixes=mixes)
    check_shape("x", x, None, None, None)
    check_shape("found", found, x.shape[0], x.shape[2])
    check_shape("mixes", mixes, *x.shape[:2])


@op(check=_check_write)
def write_streams(x: Tensor, found: Tensor, mixes: Tensor) -> Tensor:
    """Add a sublayer's output to all streams, weighted by 2 * sigmoid(mix / N).

    x        [T, N, H]
    found    [T, H]
    mixes    [T, N]
    returns  [T, N, H]  in x's dtype
    """
    weights = 2 * (mixes.float() / x.shape[1]).sigmoid()
    return (x.float() + weights[..., None] * found.float()[:, None]).to(x.dtype)
