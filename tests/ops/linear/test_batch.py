"""Tens of tokens on Hopper, on numpy: products of codes and tokens, reduction over a cluster, residual add and norm."""

from itertools import accumulate, product

import pytest
import torch

from auraflux.ops._cases import relative_rms
from auraflux.ops.norm.reference import add_rms_norm

pytest.importorskip("triton")
from auraflux.ops.linear.cuda.call import NO_NORM, FusedNorm
from auraflux.ops.linear.cuda.gemm.cluster import matmul_batch
from auraflux.ops.linear.cuda.gemm.cluster_dense import DenseProduct, scores_batch
from auraflux.ops.linear.cuda.row_copies import Product
from tests.emulator.cluster import run_cluster
from tests.emulator.ptx import Device
from tests.ops.linear.test_hopper import nothing, put, weight_of

EPS, TOL, WARPS = 1e-6, 4e-3, 4


def stream_of(tokens: int, width: int, kind: str) -> tuple:
    x, delta, norm = torch.randn(tokens, width).bfloat16(), torch.randn(tokens, width).bfloat16(), torch.rand(width) + 0.5
    return {"plain": (x, None, None), "normed": (x, None, norm), "summed": (x, delta, norm)}[kind]


def read(stream: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of the product, and the sum x + delta."""
    x, delta, norm = stream
    if norm is None:
        return x, x
    return add_rms_norm(torch.zeros_like(x) if delta is None else delta, x, norm, EPS)


def ends_of(rows: list[int], each: int) -> tuple[int, ...]:
    return tuple(accumulate(-(-count // each) for count in rows))


def multiply(stream: tuple, weights: list, programs: int, late: bool = False) -> tuple[list, torch.Tensor]:
    """Run every cluster of `matmul_batch`; return the products and the sum x + delta."""
    device, (tokens, width) = Device(), stream[0].shape
    rows = [weight.shape[0] for weight in weights]
    outs, total = [device.put(nothing(tokens, count)) for count in rows], device.put(nothing(tokens, width))
    x, delta, norm = (device.put(part) for part in stream)
    products = tuple(Product(put(device, weight), out) for weight, out in zip(weights, outs, strict=True))
    ends = ends_of(rows, 16 * WARPS)
    normed = NO_NORM if norm is None else FusedNorm(delta, norm, total, EPS)
    tiles = 1 << (-(-tokens // 8) - 1).bit_length()
    args = x, normed, products, tuple(rows), ends[:-1], ends[-1], tokens, width, tiles, WARPS, programs, late
    for number in range(ends[-1]):
        run_cluster(device, WARPS, programs, (number,), matmul_batch, args)
    found = [device.get(out, nothing(tokens, count)).float() for out, count in zip(outs, rows, strict=True)]
    return found, device.get(total, nothing(tokens, width))


def multiplied(x: torch.Tensor, weight) -> torch.Tensor:
    return x.float() @ weight.dequantize(torch.float32).T


@pytest.mark.parametrize("kind", ["plain", "normed", "summed"])
@pytest.mark.parametrize(("tokens", "width", "programs"), [(13, 1024, 2), (3, 512, 1), (50, 512, 1)])
def test_one_weight(tokens: int, width: int, programs: int, kind: str):
    torch.manual_seed(tokens)
    stream, weight = stream_of(tokens, width, kind), weight_of(64, width, 4, 64)
    (found,), total = multiply(stream, [weight], programs, tokens > 32)
    h, wanted = read(stream)
    assert relative_rms(found, multiplied(h, weight)) < TOL
    assert kind != "summed" or torch.equal(total, wanted)


def test_several_weights_whose_rows_end_anywhere():
    torch.manual_seed(0)
    stream, weights = stream_of(9, 1024, "summed"), [weight_of(rows, 1024, 4, 64) for rows in (72, 64, 1, 16)]
    found, total = multiply(stream, weights, 2)
    h, wanted = read(stream)
    assert torch.equal(total, wanted)
    for mine, weight in zip(found, weights, strict=True):
        assert relative_rms(mine, multiplied(h, weight)) < TOL


@pytest.mark.parametrize(("tokens", "rows", "blocks"), [(5, [40], 2), (30, [33, 1], 1), (64, [16], 1), (70, [17], 1)])
def test_scores(tokens: int, rows: list[int], blocks: int):
    torch.manual_seed(0)
    device, width, programs = Device(), 1024, 4
    x, delta, norm = stream_of(tokens, width, "summed")
    weights = [(torch.randn(count, width) / 32).bfloat16() for count in rows]
    total, h = (device.put(nothing(tokens, width)) for _ in range(2))
    outs = [device.put(nothing(tokens, count)) for count in rows]
    products = tuple(DenseProduct(device.put(weight), out) for weight, out in zip(weights, outs, strict=True))
    ends, tiles = ends_of(rows, 16 * blocks), 1 << (-(-(tokens if tokens <= 64 else 32) // 8) - 1).bit_length()
    args = device.put(x), FusedNorm(device.put(delta), device.put(norm), total, EPS), h, products, tuple(rows), ends[:-1]
    args += ends[-1], tokens, width, blocks, tiles, WARPS, programs
    for number, piece in product(range(ends[-1]), range(-(-tokens // (8 * tiles)))):
        run_cluster(device, WARPS, programs, (number, piece), scores_batch, args)
    wanted_h, wanted_total = add_rms_norm(delta, x, norm, EPS)
    assert torch.equal(device.get(total, wanted_total), wanted_total)
    assert relative_rms(device.get(h, wanted_h), wanted_h) < 1e-3
    for out, weight, count in zip(outs, weights, rows, strict=True):
        assert relative_rms(device.get(out, nothing(tokens, count)).float(), wanted_h.float() @ weight.float().T) < TOL
