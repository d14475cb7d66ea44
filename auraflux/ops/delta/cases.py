"""Inputs for the delta ops: equal and odd head widths, shared keys, ragged lengths around a chunk, closed gates."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from auraflux.ops._cases import Args, Case
from auraflux.ops.delta.reference import (
    channel_delta,
    channel_gates,
    delta_gates,
    delta_layer_step,
    gated_delta_prefill,
    gated_delta_step,
    scan_gates,
    selective_scan,
    short_conv,
)

BF16 = torch.bfloat16


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def step(
    batch: int = 1,
    heads: int = 4,
    key_heads: int = 2,
    key_width: int = 128,
    value_width: int = 128,
    tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Args:
    """Return one token of each sequence, or `tokens` in all."""
    tokens = batch if tokens is None else tokens
    return {
        "state": torch.randn(batch, heads, key_width, value_width),
        "q": (normalize(torch.randn(tokens, key_heads, key_width), dim=-1) * key_width**-0.5).to(dtype),
        "k": normalize(torch.randn(tokens, key_heads, key_width), dim=-1).to(dtype),
        "v": torch.randn(tokens, heads, value_width).to(dtype),
        "decay": torch.rand(tokens, heads) ** 0.25,
        "beta": torch.rand(tokens, heads),
    }


def prefill(*lengths: int, **sizes: int | torch.dtype) -> Args:
    args = step(len(lengths), tokens=sum(lengths), **sizes)  # type: ignore[arg-type]
    return {**args, "starts": starts(list(lengths))}


def closing(args: Args) -> Args:
    """Close a third of the gates, and make some decays so small that their products underflow float32."""
    drawn = torch.rand_like(args["decay"])
    args["decay"][drawn < 0.3] = 0.0
    args["decay"][drawn > 0.7] = 1e-30
    return args


def conv(*lengths: int, channels: int, dtype: torch.dtype = torch.float32) -> Args:
    x, state = torch.randn(sum(lengths), channels).to(dtype), torch.randn(len(lengths), 3, channels).to(dtype)
    return {"x": x, "state": state, "weight": torch.randn(4, channels), "starts": starts(list(lengths))}


def biased(args: Args) -> Args:
    return {**args, "bias": torch.randn(args["x"].shape[1])}


def gates(tokens: int, heads: int, scale: float = 3.0, dtype: torch.dtype = torch.float32) -> Args:
    a, b = (torch.randn(tokens, heads) * scale).to(dtype), (torch.randn(tokens, heads) * scale).to(dtype)
    return {"a": a, "b": b, "a_log": (torch.rand(heads) * 16).log(), "dt_bias": torch.randn(heads)}


def channels(*lengths: int, **sizes: int | torch.dtype) -> Args:
    """Return `prefill` inputs with a key per head and a decay per key channel."""
    args = prefill(*lengths, **{"key_heads": sizes.get("heads", 4), **sizes})
    return {**args, "decay": torch.rand(args["q"].shape) ** 0.25}


def channel_gate(
    tokens: int,
    heads: int,
    width: int,
    scale: float = 3.0,
    dtype: torch.dtype = torch.float32,
    floor: float | None = None,
) -> Args:
    f, b = (torch.randn(tokens, heads, width) * scale).to(dtype), (torch.randn(tokens, heads) * scale).to(dtype)
    rates = (torch.rand(heads) * 16).log()
    return {"f": f, "b": b, "a_log": rates, "dt_bias": torch.randn(heads, width), "floor": floor}


def scan(
    *lengths: int,
    heads: int = 8,
    groups: int = 2,
    key_width: int = 128,
    value_width: int = 64,
    dtype: torch.dtype = torch.float32,
) -> Args:
    """Return values, keys and queries of Mamba-2's heads, with realistic gates."""
    tokens, channels = sum(lengths), heads * value_width + 2 * groups * key_width
    step = torch.rand(tokens, heads)
    return {
        "state": torch.randn(len(lengths), heads, key_width, value_width),
        "xbc": torch.randn(tokens, channels).to(dtype),
        "decay": torch.exp(-step * (torch.rand(heads) + 0.01)),
        "step": step,
        "skip": torch.randn(heads),
        "starts": starts(list(lengths)),
    }


def scan_gate(tokens: int, heads: int, scale: float = 3.0, dtype: torch.dtype = torch.float32) -> Args:
    dt = (torch.randn(tokens, heads) * scale).to(dtype)
    return {"dt": dt, "a_log": (torch.rand(heads) * 16).log(), "dt_bias": torch.randn(heads)}


def layer_inputs(batch: int, heads: int, key_heads: int, width: int = 128, dtype: torch.dtype = BF16) -> Args:
    """Return one token of each sequence, as a layer's projections produce it."""
    channels = (2 * key_heads + heads) * width
    gate = gates(batch, heads, dtype=dtype)
    return {
        "qkv": torch.randn(batch, channels).to(dtype),
        "z": torch.randn(batch, heads, width).to(dtype),
        "a": gate["a"],
        "b": gate["b"],
        "conv": torch.randn(batch, 3, channels).to(dtype),
        "state": torch.randn(batch, heads, width, width) * 0.3,
        "taps": torch.randn(4, channels) / 2,
        "a_log": gate["a_log"],
        "dt_bias": gate["dt_bias"],
        "norm": 1 + torch.randn(width) / 10,
        "starts": starts([1] * batch),
        "unit_eps": 1e-6,
        "eps": 1e-6,
    }


def layer_nbytes(args: Args) -> int:
    every = sum(x.numel() * x.element_size() for x in args.values() if isinstance(x, Tensor))
    return every + sum(args[name].numel() * args[name].element_size() for name in ("state", "conv", "z"))


def state_flops(args: Args) -> int:
    # the state is read at the key and at the query, and written: a multiplication and an addition each
    return 6 * args["v"].shape[0] * args["state"][0].numel()


def state_nbytes(args: Args) -> int:
    every = sum(x.numel() * x.element_size() for x in args.values())
    return every + args["state"].numel() * 4 + args["v"].numel() * args["v"].element_size()


def scan_nbytes(args: Args) -> int:
    return sum(x.numel() * x.element_size() for x in args.values()) + args["state"].numel() * 4


CASES = [
    Case(gated_delta_step, "one-token", lambda: step(1, 32, 16), bench=True, flops=state_flops, nbytes=state_nbytes),
    Case(gated_delta_step, "batch", lambda: step(8, 32, 16), bench=True, flops=state_flops, nbytes=state_nbytes),
    Case(gated_delta_step, "own-keys", lambda: step(3, 2, 2, 64, 64)),
    Case(gated_delta_step, "odd-widths", lambda: step(2, 6, 2, 63, 100)),
    Case(gated_delta_step, "narrow", lambda: step(2, 2, 1, 5, 3)),
    Case(gated_delta_step, "wide", lambda: step(1, 2, 2, 100, 333)),
    Case(gated_delta_step, "closed-gates", lambda: closing(step(8, 8, 4, 64, 64))),
    Case(gated_delta_step, "bf16", lambda: step(2, dtype=BF16), tol=4e-3),
    Case(gated_delta_prefill, "512-tokens", lambda: prefill(512, heads=32, key_heads=16), bench=True, flops=state_flops),
    Case(gated_delta_prefill, "2048-tokens", lambda: prefill(2048, heads=32, key_heads=16), bench=True, flops=state_flops),
    Case(gated_delta_prefill, "batch", lambda: prefill(*[64] * 4, heads=32, key_heads=16), bench=True, flops=state_flops),
    Case(gated_delta_prefill, "one-token", lambda: prefill(1)),
    Case(gated_delta_prefill, "ragged", lambda: prefill(17, 0, 1, 5, 40)),
    Case(
        gated_delta_prefill, "around-a-chunk", lambda: prefill(6, 7, 8, 9, 15, 16, 17, 31, 32, 33, key_width=64, value_width=64)
    ),
    Case(gated_delta_prefill, "empty", lambda: prefill(0, 0)),
    Case(gated_delta_prefill, "own-keys", lambda: prefill(50, key_heads=4, key_width=64, value_width=64)),
    Case(gated_delta_prefill, "many-share", lambda: prefill(20, 30, heads=12, key_heads=3, key_width=64, value_width=64)),
    Case(gated_delta_prefill, "odd-widths", lambda: prefill(3, 37, key_width=63, value_width=100)),
    Case(gated_delta_prefill, "narrow", lambda: prefill(2, 19, heads=3, key_heads=1, key_width=5, value_width=3)),
    Case(gated_delta_prefill, "closed-gates", lambda: closing(prefill(100, 3, key_width=64, value_width=64))),
    Case(gated_delta_prefill, "bf16", lambda: prefill(33, 4, dtype=BF16), tol=4e-3),
    # full chunks run on tensor cores in bf16 and float16
    Case(gated_delta_prefill, "bf16-chunks", lambda: prefill(150, 0, 64, 3, dtype=BF16), tol=6e-3),
    Case(gated_delta_prefill, "bf16-one-sequence", lambda: prefill(330, heads=8, dtype=BF16), tol=6e-3),
    Case(gated_delta_prefill, "bf16-many-heads", lambda: prefill(140, heads=64, key_heads=16, dtype=BF16), tol=6e-3),
    Case(gated_delta_prefill, "bf16-many-ragged", lambda: prefill(70, 3, 65, heads=32, key_heads=8, dtype=BF16), tol=6e-3),
    Case(gated_delta_prefill, "bf16-closed-gates", lambda: closing(prefill(130, 70, dtype=BF16)), tol=6e-3),
    Case(short_conv, "one-token", lambda: conv(1, channels=8192), bench=True),
    Case(short_conv, "512-tokens", lambda: conv(512, channels=8192), bench=True),
    Case(short_conv, "ragged", lambda: conv(1, 0, 2, 3, 4, 7, channels=333)),
    Case(short_conv, "batch", lambda: conv(*[1] * 12, channels=1100)),
    Case(short_conv, "long", lambda: conv(40, 3, channels=70)),
    Case(short_conv, "empty", lambda: conv(0, 0, channels=63)),
    Case(short_conv, "bias", lambda: biased(conv(2, 9, 1, channels=1100))),
    Case(short_conv, "bias-long", lambda: biased(conv(40, 3, channels=70))),
    Case(short_conv, "plain", lambda: {**conv(2, 9, 1, channels=1100), "plain": True}),
    Case(short_conv, "plain-long", lambda: {**biased(conv(40, 3, channels=70)), "plain": True}),
    Case(short_conv, "bf16", lambda: conv(2, 9, channels=100, dtype=BF16), tol=4e-3),
    Case(delta_gates, "one-token", lambda: gates(1, 32), bench=True),
    Case(delta_gates, "512-tokens", lambda: gates(512, 32), bench=True),
    Case(delta_gates, "odd-heads", lambda: gates(7, 63)),
    Case(delta_gates, "large", lambda: gates(33, 16, scale=60.0)),
    Case(delta_gates, "bf16", lambda: gates(5, 100, dtype=BF16)),
    # the fused kernel does not round to bf16 between the steps
    Case(delta_layer_step, "one-token", lambda: layer_inputs(1, 32, 16), tol=8e-3, bench=True, nbytes=layer_nbytes),
    Case(delta_layer_step, "batch", lambda: layer_inputs(8, 32, 16), tol=8e-3, bench=True, nbytes=layer_nbytes),
    Case(delta_layer_step, "many-share", lambda: layer_inputs(3, 16, 4), tol=8e-3),
    Case(delta_layer_step, "own-keys", lambda: layer_inputs(2, 4, 4), tol=8e-3),
    Case(delta_layer_step, "narrow", lambda: layer_inputs(2, 4, 2, 64), tol=8e-3),
    Case(delta_layer_step, "f32", lambda: layer_inputs(2, 4, 2, 64, torch.float32)),
    Case(channel_delta, "one-token", lambda: channels(1, heads=32), bench=True, flops=state_flops, nbytes=state_nbytes),
    Case(channel_delta, "512-tokens", lambda: channels(512, heads=32), bench=True, flops=state_flops),
    Case(channel_delta, "ragged", lambda: channels(17, 0, 1, 5, 40, key_width=64, value_width=64)),
    Case(channel_delta, "odd-widths", lambda: channels(3, 37, key_width=63, value_width=100)),
    Case(channel_delta, "narrow", lambda: channels(2, 19, heads=3, key_width=5, value_width=3)),
    Case(channel_delta, "closed-gates", lambda: closing(channels(100, 3, key_width=64, value_width=64))),
    Case(channel_delta, "empty", lambda: channels(0, 0)),
    Case(channel_delta, "bf16", lambda: channels(33, 4, key_width=64, value_width=64, dtype=BF16), tol=4e-3),
    Case(channel_gates, "one-token", lambda: channel_gate(1, 32, 128), bench=True),
    Case(channel_gates, "many-tokens", lambda: channel_gate(65, 8, 64)),
    Case(channel_gates, "odd", lambda: channel_gate(7, 3, 63)),
    Case(channel_gates, "large", lambda: channel_gate(5, 4, 16, scale=60.0)),
    Case(channel_gates, "bf16", lambda: channel_gate(5, 4, 100, dtype=BF16)),
    Case(channel_gates, "floor", lambda: channel_gate(9, 4, 63, floor=-5.0)),
    Case(selective_scan, "one-token", lambda: scan(1, heads=64, groups=8), bench=True, nbytes=scan_nbytes),
    Case(selective_scan, "512-tokens", lambda: scan(512, heads=64, groups=8), bench=True),
    Case(selective_scan, "ragged", lambda: scan(17, 0, 1, 5, 40, key_width=32)),
    Case(selective_scan, "odd-widths", lambda: scan(3, 37, heads=6, groups=3, key_width=63, value_width=100)),
    Case(selective_scan, "narrow", lambda: scan(2, 19, heads=3, groups=1, key_width=5, value_width=3)),
    Case(selective_scan, "closed-gates", lambda: closing(scan(20, 3, heads=4, key_width=32, value_width=32))),
    Case(selective_scan, "empty", lambda: scan(0, 0)),
    Case(selective_scan, "bf16", lambda: scan(4, 1, heads=4, groups=4, key_width=64, dtype=BF16), tol=4e-3),
    Case(selective_scan, "bf16-wide", lambda: scan(40, heads=2, groups=1, dtype=BF16), tol=4e-3),
    Case(
        selective_scan,
        "bf16-around-a-chunk",
        lambda: scan(31, 0, 32, 33, 63, 65, heads=2, key_width=16, value_width=16, dtype=BF16),
        tol=4e-3,
    ),
    Case(selective_scan, "bf16-odd", lambda: scan(50, heads=3, groups=1, key_width=33, value_width=20, dtype=BF16), tol=4e-3),
    Case(
        selective_scan,
        "bf16-closed-gates",
        lambda: closing(scan(100, heads=2, groups=1, key_width=32, value_width=16, dtype=BF16)),
        tol=4e-3,
    ),
    Case(scan_gates, "one-token", lambda: scan_gate(1, 64), bench=True),
    Case(scan_gates, "many-tokens", lambda: scan_gate(65, 128)),
    Case(scan_gates, "odd", lambda: scan_gate(7, 63)),
    Case(scan_gates, "large", lambda: scan_gate(5, 16, scale=60.0)),
    Case(scan_gates, "bf16", lambda: scan_gate(5, 100, dtype=BF16)),
]
