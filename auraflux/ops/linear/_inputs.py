"""Inputs of the cases: weights of every format, tokens for them, and their memory traffic."""

from collections.abc import Callable
from typing import Any

import torch

from auraflux.ops._cases import Args
from auraflux.ops.simd.isa import ISA
from auraflux.quant import QTensor, affine, grids, quantize

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LANES = ISA.lanes


def weight(
    rows: int, width: int, bits: int, group: int = 64, scales: torch.dtype = BF16, lanes: int = LANES, kind: str = "affine"
) -> QTensor:
    numbers = (torch.randn(rows, width) / width**0.5).to(scales)
    if group not in affine.GROUPS and kind == "affine":
        # groups of checkpoints only: nothing is quantized to them
        return QTensor(*affine.encode(numbers, bits, group), bits, group, (rows, width)).interleave(lanes)
    return quantize(numbers, bits, group, kind).interleave(lanes)


def grid(rows: int, width: int, kind: str, lanes: int = LANES) -> QTensor:
    """Return random entries, signs and steps of a grid format, with scales of ordinary size."""
    form, blocks = grids.FORMATS[kind], width // grids.SIZE
    packed = torch.randint(-(2**31), 2**31, (rows, width * form.bits // 32), dtype=torch.int32)
    halves = torch.randint(-(2**15), 2**15, (rows, blocks, form.halves), dtype=torch.int16)
    scale = ((torch.rand(rows, blocks, 1) + 0.5) * 0.002).half().view(torch.int16)
    if kind == "iq1_m":
        quarters = scale.int() >> torch.arange(0, 16, 4, dtype=torch.int32) << 12
        halves[..., :4] = (halves[..., :4].int() & 0xFFF | quarters).to(torch.int16)
    else:
        halves[..., :1] = scale
    return QTensor(packed, halves.flatten(1), None, form.bits, form.group, (rows, width)).interleave(lanes)


def grid_product(tokens: int, rows: int, width: int, kind: str, dtype: torch.dtype = F32, lanes: int = LANES) -> Args:
    return {"x": torch.randn(tokens, width).to(dtype), "weight": grid(rows, width, kind, lanes)}


def product(tokens: int, rows: int, width: int, bits: int, dtype: torch.dtype = F32, bias: bool = False, **options) -> Args:
    args: Args = {"x": torch.randn(tokens, width).to(dtype), "weight": weight(rows, width, bits, **options)}
    return {**args, "bias": torch.randn(rows)} if bias else args


def coded(tokens: int, rows: int, width: int, bits: int, group: int) -> Args:
    """Return bf16 arguments; a group of 0 stands for MXFP4."""
    return product(tokens, rows, width, bits, dtype=BF16, group=group or 32, kind="affine" if group else "mxfp4")


def dense(tokens: int, rows: int, width: int, dtype: torch.dtype) -> Args:
    return {"x": torch.randn(tokens, width), "weight": (torch.randn(rows, width) / width**0.5).to(dtype)}


def pair(tokens: int, rows: int, width: int, bits: int, up_bits: int | None = None, **options) -> Args:
    up = weight(rows, width, up_bits or bits, **options)
    return {"x": torch.randn(tokens, width), "gate": weight(rows, width, bits, **options), "up": up}


def several(tokens: int, rows: tuple[int, ...], width: int, bits: int, last_bits: int | None = None, **options) -> Args:
    weights = [weight(n, width, bits, **options) for n in rows[:-1]]
    return {"x": torch.randn(tokens, width), "weights": (*weights, weight(rows[-1], width, last_bits or bits, **options))}


def in_bf16(args: Args) -> Args:
    return {**args, "x": args["x"].to(BF16)}


def in_bf16_of(make: Callable[..., Args], *sizes: Any, **options: Any) -> Args:
    return in_bf16(make(*sizes, **options))


def with_biases(args: Args) -> Args:
    return {**args, "biases": [torch.randn(args["weights"][0].shape[0]), None, torch.randn(args["weights"][2].shape[0])]}


def several_in_bf16(tokens: int, rows: tuple[int, ...], width: int, bits: int) -> Args:
    return in_bf16(several(tokens, rows, width, bits))


def pair_in_bf16(tokens: int, rows: int, width: int, bits: int = 4) -> Args:
    return in_bf16(pair(tokens, rows, width, bits))


def with_all_biases(args: Args) -> Args:
    return {**args, "biases": [torch.randn(weight.shape[0]) for weight in args["weights"]]}


def bf16_pair(first: int, second: int, width: int) -> list[torch.Tensor]:
    return [(torch.randn(rows, width) / width**0.5).to(BF16) for rows in (first, second)]


def from_stream(tokens: int, width: int, rows: list[int], dtype: torch.dtype = torch.float32) -> Args:
    """Return a residual stream, its update, a norm and small dense weights."""
    x, delta = torch.randn(tokens, width).to(dtype), torch.randn(tokens, width).to(dtype)
    weights = [(torch.randn(count, width) / width**0.5).to(dtype) for count in rows]
    return {"x": x, "delta": delta, "norm": 1 + 0.1 * torch.randn(width), "eps": 1e-6, "weights": weights}


def stream_in_bf16(tokens: int, rows: tuple[int, ...], width: int, alone: bool) -> Args:
    """Return tokens for quantized weights; `alone` leaves out the update of the stream."""
    made = {**from_stream(tokens, width, [], BF16), "weights": [weight(count, width, 4) for count in rows]}
    return {**made, "delta": None} if alone else made


def gated_stream(tokens: int, rows: int, width: int, dtype: torch.dtype = torch.float32) -> Args:
    made = from_stream(tokens, width, [], dtype)
    del made["weights"]
    return {**made, "gate": weight(rows, width, 4), "up": weight(rows, width, 4)}


def dense_pair(tokens: int, rows: int, width: int) -> Args:
    return {"x": torch.randn(tokens, width), "gate": torch.randn(rows, width), "up": torch.randn(rows, width)}


def broken(args: Args) -> Args:
    args["weight"].scales.view(-1)[5] = torch.nan
    return args


def broken_input(args: Args) -> Args:
    args["x"][1, 7] = torch.nan
    return args


def zeros(args: Args) -> Args:
    args["x"][1:] = 0
    return args


def lookup(tokens: int, rows: int, width: int, bits: int, **options) -> Args:
    return {"ids": torch.randint(0, rows, (tokens,)), "table": weight(rows, width, bits, **options)}


def grid_lookup(tokens: int, rows: int, width: int, kind: str, lanes: int = LANES) -> Args:
    return {"ids": torch.randint(0, rows, (tokens,)), "table": grid(rows, width, kind, lanes)}


def large(rows: int, width: int, bits: int, group: int = 64) -> QTensor:
    """Return random codes, scales and biases, because quantizing a matrix of this size takes seconds."""
    packed = torch.randint(-(2**31), 2**31, (rows, width * bits // 32), dtype=torch.int32)
    scales = ((torch.rand(rows, width // group) + 0.5) / (width**0.5 * 2 ** (bits - 1))).to(BF16)
    return QTensor(packed, scales, -scales * 2 ** (bits - 1), bits, group, (rows, width)).interleave(LANES)


def large_product(tokens: int, bits: int) -> Args:
    return {"x": torch.randn(tokens, 4096), "weight": large(11008, 4096, bits)}


def large_format(
    bits: int, group: int, scales: torch.dtype, biased: bool, tokens: int = 1, rows: int = 11008, width: int = 4096
) -> Args:
    """Return tokens and random codes of a format that MLX lacks."""
    packed = torch.randint(-(2**31), 2**31, (rows, width * bits // 32), dtype=torch.int32)
    if bits == 8 and not biased:
        # FP8 codes without NaN
        packed &= -0x40404041
    made = torch.full((rows, width // group), 120, dtype=torch.uint8)
    if scales is not torch.uint8:
        made = ((torch.rand(rows, width // group) + 0.5) / (width**0.5 * 2 ** (bits - 1))).to(scales)
    biases = -made * 2 ** (bits - 1) if biased else None
    weight = QTensor(packed, made, biases, bits, group, (rows, width)).interleave(LANES)
    return {"x": torch.randn(tokens, width), "weight": weight}


def flops(args: Args) -> int:
    x = args["x"]
    weights = args.get("weights") or [args[name] for name in ("weight", "gate", "up") if name in args]
    return 2 * x.numel() * sum(weight.shape[0] for weight in weights)


def touched(args: Args) -> int:
    """Count the bytes of the rows that an embedding reads and writes."""
    ids, table = args["ids"], args["table"]
    return len(ids) * (table.nbytes // table.shape[0] + 4 * table.shape[1])
