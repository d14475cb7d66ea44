"""Kernels of the delta ops on CUDA: the first route below that does not refuse a call.

Inside `invariant` states run through tokens one by one, in prefill as in decode.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from auraflux.ops._dispatch import is_invariant
from auraflux.ops.delta.cuda import chunks, conv, decode, prefill, selective, serial
from auraflux.ops.delta.cuda.mma import prefill as prefill_mma
from auraflux.ops.delta.reference import LAYER_STEPS, layer_step_by
from auraflux.ops.gpu.device import not_gluon, not_wgmma
from auraflux.ops.routes import Route, Routes

WIDEST_KEY = 256
SERIAL_TOKENS = 16  # per sequence; up to here one program convolves a sequence's tokens one by one
BF16 = torch.bfloat16
UNALIGNED = "an address is not a multiple of 16 bytes"


class PrefillCall(NamedTuple):
    """Arguments of `gated_delta_prefill`, and its output."""

    state: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor
    starts: Tensor
    out: Tensor


class ConvCall(NamedTuple):
    """Arguments of `short_conv`, and its output."""

    x: Tensor
    state: Tensor
    weight: Tensor
    bias: Tensor | None
    starts: Tensor
    out: Tensor
    plain: bool


class ScanCall(NamedTuple):
    """Arguments of `selective_scan`, and its output."""

    state: Tensor
    xbc: Tensor
    decay: Tensor
    step: Tensor
    skip: Tensor
    starts: Tensor
    out: Tensor


class LayerStepCall(NamedTuple):
    """Arguments of `delta_layer_step`."""

    qkv: Tensor
    z: Tensor
    a: Tensor
    b: Tensor
    conv: Tensor
    state: Tensor
    taps: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    starts: Tensor
    unit_eps: float
    eps: float


def _not_in_tiles(call: PrefillCall) -> str | None:
    """Return why chunks do not fit the kernels of heads of 128 channels."""
    if tuple(call.state.shape[2:]) != (prefill.WIDTH, prefill.WIDTH):
        return f"heads of {call.state.shape[2]} and {call.state.shape[3]} channels; it is for {prefill.WIDTH}"
    if len(call.v) < prefill.C.value:
        return f"{len(call.v)} tokens are less than a chunk of {prefill.C.value}"
    if not call.q.dtype == call.k.dtype == call.v.dtype == BF16 or not call.decay.dtype == call.beta.dtype == torch.float32:
        return "not all in bf16, gates in float32"
    if (call.q.data_ptr() | call.k.data_ptr() | call.v.data_ptr()) % 16:
        return UNALIGNED
    return None


def _refuses_prefill(call: PrefillCall) -> str | None:
    return _not_in_tiles(call) or not_wgmma(call.v.device)


def _refuses_prefill_mma(call: PrefillCall) -> str | None:
    return _not_in_tiles(call) or not_gluon(call.v.device)


def _refuses_chunks(call: PrefillCall) -> str | None:
    width = call.state.shape[2]
    return f"keys of {width} channels, wider than {WIDEST_KEY}" if width > WIDEST_KEY else None


def _refuses_serial(call: ConvCall) -> str | None:
    tokens, sequences = len(call.x), len(call.state)
    return f"{tokens} tokens of {sequences} sequences" if tokens > SERIAL_TOKENS * sequences else None


def _refuses_scan_chunks(call: ScanCall) -> str | None:
    tokens, sequences = len(call.xbc), len(call.state)
    if tokens <= SERIAL_TOKENS * sequences:
        return f"{tokens} tokens of {sequences} sequences; it is for more than {SERIAL_TOKENS} of each"
    return "values are float32; its MMAs are tf32" if call.xbc.dtype is torch.float32 else None


def _refuses_decode(call: LayerStepCall) -> str | None:
    if {call.qkv.dtype, call.z.dtype, call.a.dtype, call.b.dtype, call.conv.dtype} != {BF16}:
        return "not all in bf16"
    if tuple(call.state.shape[2:]) != (decode.WIDTH, decode.WIDTH):
        return f"heads of {call.state.shape[2]} and {call.state.shape[3]} channels; it is for {decode.WIDTH}"
    shared = call.state.shape[1] // decode.key_heads_of(call.qkv, call.state)
    if shared not in (1, 2, 4, 8):
        return f"{shared} value heads on a key head; it is for 1, 2, 4 or 8"
    if (call.z.data_ptr() | call.state.data_ptr()) % 16:
        return UNALIGNED
    if call.qkv.shape[0] * call.state.shape[1] // shared > decode.MOST_KEY_HEADS:
        return f"{call.qkv.shape[0]} sequences have more key heads than {decode.MOST_KEY_HEADS}"
    return not_gluon(call.qkv.device)


def _refuses_one_by_one(call: PrefillCall) -> str | None:
    if not is_invariant():
        return "chunks are quicker"
    width = call.state.shape[2]
    return f"keys of {width} channels, wider than {2 * WIDEST_KEY}" if width > 2 * WIDEST_KEY else None


def _never(call: object) -> None:
    return None


def _decode(call: LayerStepCall) -> Tensor:
    out = torch.empty_like(call.z)
    if out.numel():
        decode.run_layer_step(*call[:10], call.unit_eps, call.eps, out)
    return out


def _step_by_step(call: LayerStepCall) -> Tensor:
    return layer_step_by(LAYER_STEPS, *call)


PREFILL: Routes[PrefillCall, None] = Routes(
    Route("one by one", _refuses_one_by_one, lambda call: serial.run_serial(*call), invariant=True),
    Route("prefill", _refuses_prefill, lambda call: prefill.prefill_hopper(*call)),
    Route("prefill_mma", _refuses_prefill_mma, lambda call: prefill_mma.prefill_mma(*call)),
    Route("chunks", _refuses_chunks, lambda call: chunks.run_chunks(*call)),
)
CONV: Routes[ConvCall, None] = Routes(
    Route("conv, token by token", _refuses_serial, lambda call: conv.convolve_serially(*call)),
    Route("conv, all tokens at once", _never, lambda call: conv.convolve_tiles(*call), invariant=True),
)
SCAN: Routes[ScanCall, None] = Routes(
    Route("scan, in chunks", _refuses_scan_chunks, lambda call: selective.scan_in_chunks(*call)),
    Route("scan, token by token", _never, lambda call: selective.scan_one_by_one(*call), invariant=True),
)
LAYER: Routes[LayerStepCall, Tensor] = Routes(
    Route("decode", _refuses_decode, _decode),
    Route("step by step", _never, _step_by_step, invariant=True),
)
ROUTES = {"gated_delta_prefill": PREFILL, "short_conv": CONV, "selective_scan": SCAN, "delta_layer_step": LAYER}
