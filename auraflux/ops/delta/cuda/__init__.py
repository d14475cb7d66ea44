"""The delta ops on CUDA; `routes.py` selects the kernels. Everything that depends on `starts` is read on the device."""

import torch
from torch import Tensor

from auraflux.ops._dispatch import Declined, is_invariant
from auraflux.ops.delta.cuda.channels import make_channel_gates, run_channels
from auraflux.ops.delta.cuda.gates import make_gates
from auraflux.ops.delta.cuda.routes import (
    CONV,
    LAYER,
    PREFILL,
    SCAN,
    WIDEST_KEY,
    ConvCall,
    LayerStepCall,
    PrefillCall,
    ScanCall,
)
from auraflux.ops.delta.cuda.selective import make_scan_gates
from auraflux.ops.delta.cuda.serial import run_serial
from auraflux.ops.delta.cuda.step import run_step
from auraflux.ops.gpu.device import ready

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


def gated_delta_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    ready(state)
    if state.shape[2] > 2 * WIDEST_KEY:
        raise Declined(f"keys of {state.shape[2]} channels, wider than {2 * WIDEST_KEY}")
    out = torch.empty_like(v)
    if not state.numel():
        return out.zero_()
    if is_invariant():
        run_serial(state, q, k, v, decay, beta, None, out)
    else:
        run_step(state, q, k, v, decay, beta, out)
    return out


def gated_delta_prefill(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor) -> Tensor:
    ready(state)
    out = torch.empty_like(v)
    if out.numel():
        PREFILL(PrefillCall(state, q, k, v, decay, beta, starts.to(v.device, non_blocking=True), out))
    return out


def short_conv(
    x: Tensor, state: Tensor, weight: Tensor, starts: Tensor, bias: Tensor | None = None, plain: bool = False
) -> Tensor:
    ready(x)
    out = torch.empty_like(x)
    if x.numel():
        CONV(ConvCall(x, state, weight, bias, starts.to(x.device, non_blocking=True), out, plain))
    return out


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    ready(a)
    decay, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    make_gates(a, b, a_log, dt_bias, decay, beta)
    return decay, beta


def delta_layer_step(
    qkv: Tensor, z: Tensor, a: Tensor, b: Tensor, conv: Tensor, state: Tensor, taps: Tensor, a_log: Tensor, dt_bias: Tensor,
    norm: Tensor, starts: Tensor, unit_eps: float, eps: float,
) -> Tensor:  # fmt: skip
    ready(qkv)
    return LAYER(LayerStepCall(qkv, z, a, b, conv, state, taps, a_log, dt_bias, norm, starts, unit_eps, eps))


def channel_gates(f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, floor: float | None = None) -> tuple[Tensor, Tensor]:
    ready(f)
    decay, beta = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (f, b))
    make_channel_gates(f, b, a_log, dt_bias, decay, beta, floor)
    return decay, beta


def channel_delta(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor) -> Tensor:
    ready(state)
    if state.shape[2] > 2 * WIDEST_KEY:
        raise Declined(f"keys of {state.shape[2]} channels, wider than {2 * WIDEST_KEY}")
    out = torch.empty_like(v)
    if out.numel():
        run_channels(state, q, k, v, decay, beta, starts.to(v.device, non_blocking=True), out)
    return out


def scan_gates(dt: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    ready(dt)
    decay, step = (torch.empty(dt.shape, dtype=torch.float32, device=dt.device) for _ in range(2))
    make_scan_gates(dt, a_log, dt_bias, decay, step)
    return decay, step


def selective_scan(state: Tensor, xbc: Tensor, decay: Tensor, step: Tensor, skip: Tensor, starts: Tensor) -> Tensor:
    ready(state)
    if state.shape[2] > WIDEST_KEY:
        raise Declined(f"keys of {state.shape[2]} channels, wider than {WIDEST_KEY}")
    out = xbc.new_empty(len(xbc), state.shape[1] * state.shape[3])
    if out.numel():
        SCAN(ScanCall(state, xbc, decay, step, skip, starts.to(xbc.device, non_blocking=True), out))
    return out
