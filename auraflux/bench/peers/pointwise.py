"""Norms, activations and RoPE as torch's own operations."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import gelu, rms_norm, silu

from auraflux.bench.peers.peer import Peer, each
from auraflux.ops._cases import Args


def _rms_norm(args: Args) -> Callable[[], Any]:
    x, weight, eps = args["x"], args["weight"].to(args["x"].dtype), args["eps"]
    return lambda: rms_norm(x, weight.shape, weight, eps)


def _add_rms_norm(args: Args) -> Callable[[], Any]:
    x, residual, weight, eps = args["x"], args["residual"], args["weight"].to(args["x"].dtype), args["eps"]

    def call() -> Any:
        total = x + residual
        return rms_norm(total, weight.shape, weight, eps), total

    return call


def _gated_rms_norm(args: Args) -> Callable[[], Any]:
    x, z, weight, eps = args["x"], args["z"], args["weight"].to(args["x"].dtype), args["eps"]
    return lambda: rms_norm(x, weight.shape, weight, eps) * silu(z)


def _swiglu(args: Args) -> Callable[[], Any]:
    gate, up = args["gate"], args["up"]
    return lambda: silu(gate) * up


def _geglu(args: Args) -> Callable[[], Any]:
    gate, up = args["gate"], args["up"]
    return lambda: gelu(gate, approximate="tanh") * up


def _clamped_swiglu(args: Args) -> Callable[[], Any]:
    gate, up, alpha, limit = args["gate"], args["up"], args["alpha"], args["limit"]

    def call() -> Any:
        low = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * low * torch.sigmoid(alpha * low)

    return call


def _sigmoid_gate(args: Args) -> Callable[[], Any]:
    x, gate = args["x"], args["gate"]
    return lambda: x * torch.sigmoid(gate)


def _rope(args: Args) -> Callable[[], Any]:
    """Sine and cosine are made beforehand, as a model does once for all its layers."""
    x, half = args["x"], args["inv_freq"].shape[0]
    angles = (args["positions"].float()[:, None] * args["inv_freq"]).double()
    cosine, sine = (
        torch.cat([part.float() * args.get("mscale", 1.0)] * 2, -1)[:, None] for part in (angles.cos(), angles.sin())
    )

    def call() -> Any:
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * cosine + turned * sine

    return call


def _whole_heads(case: Any, args: Args) -> bool:
    return not args.get("interleaved", False) and 2 * args["inv_freq"].shape[0] == args["x"].shape[2]


PEERS = {
    "rms_norm": [Peer("torch", each(_rms_norm))],
    "add_rms_norm": [Peer("torch", each(_add_rms_norm), lambda result: result[0])],
    "gated_rms_norm": [Peer("torch", each(_gated_rms_norm))],
    "swiglu": [Peer("torch", each(_swiglu))],
    "geglu": [Peer("torch", each(_geglu))],
    "clamped_swiglu": [Peer("torch", each(_clamped_swiglu))],
    "sigmoid_gate": [Peer("torch", each(_sigmoid_gate))],
    "rope": [Peer("torch, sine and cosine given", each(_rope), applies=_whole_heads)],
}
