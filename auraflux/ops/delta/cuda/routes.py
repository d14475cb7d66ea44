"""Which kernel runs a delta layer on CUDA: the first below that does not refuse.

Inside `invariant` memories are taken through tokens one by one, in a prompt and in a step alike.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from auraflux.ops._dispatch import is_invariant
from auraflux.ops.delta.cuda import chunks, conv, decode, prefill, selective, serial
from auraflux.ops.delta.reference import LAYER_STEPS, layer_step_by
from auraflux.ops.hopper.device import not_hopper
from auraflux.ops.routes import Route, Routes

WIDEST_KEY = 256
SERIAL_TOKENS = 16  # per sequence; up to here one program convolves a sequence's tokens one by one
BF16 = torch.bfloat16
UNALIGNED = "an address is not a multiple of 16 bytes"


class Prompt(NamedTuple):
    """`gated_delta_prefill`: what it is called with, and where results go."""

    state: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor
    starts: Tensor
    out: Tensor


class Convolve(NamedTuple):
    """`short_conv`: what it is called with, and where results go."""

    x: Tensor
    state: Tensor
    weight: Tensor
    bias: Tensor | None
    starts: Tensor
    out: Tensor


class Scan(NamedTuple):
    """`selective_scan`: what it is called with, and where results go."""

    state: Tensor
    xbc: Tensor
    decay: Tensor
    step: Tensor
    skip: Tensor
    starts: Tensor
    out: Tensor


class LayerStep(NamedTuple):
    """`delta_layer_step`: what it is called with."""

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


def _refuses_prefill(call: Prompt) -> str | None:
    if tuple(call.state.shape[2:]) != (prefill.WIDTH, prefill.WIDTH):
        return f"heads of {call.state.shape[2]} and {call.state.shape[3]} channels; it is for {prefill.WIDTH}"
    if len(call.v) < prefill.C.value:
        return f"{len(call.v)} tokens are no whole chunk of {prefill.C.value}"
    if not call.q.dtype == call.k.dtype == call.v.dtype == BF16 or not call.decay.dtype == call.beta.dtype == torch.float32:
        return "not all in bf16, gates in float32"
    if (call.q.data_ptr() | call.k.data_ptr() | call.v.data_ptr()) % 16:
        return UNALIGNED
    return not_hopper(call.v.device)


def _refuses_chunks(call: Prompt) -> str | None:
    width = call.state.shape[2]
    return f"keys of {width} channels, wider than {WIDEST_KEY}" if width > WIDEST_KEY else None


def _refuses_serial(call: Convolve) -> str | None:
    tokens, sequences = len(call.x), len(call.state)
    return f"{tokens} tokens of {sequences} sequences" if tokens > SERIAL_TOKENS * sequences else None


def _refuses_scan_chunks(call: Scan) -> str | None:
    tokens, sequences = len(call.xbc), len(call.state)
    if tokens <= SERIAL_TOKENS * sequences:
        return f"{tokens} tokens of {sequences} sequences; it is for more than {SERIAL_TOKENS} of each"
    return "values are float32, and its products are not" if call.xbc.dtype is torch.float32 else None


def _refuses_decode(call: LayerStep) -> str | None:
    if {call.qkv.dtype, call.z.dtype, call.a.dtype, call.b.dtype, call.conv.dtype} != {BF16}:
        return "not all in bf16"
    if tuple(call.state.shape[2:]) != (decode.WIDTH, decode.WIDTH):
        return f"heads of {call.state.shape[2]} and {call.state.shape[3]} channels; it is for {decode.WIDTH}"
    shared = call.state.shape[1] // decode.key_heads_of(call.qkv, call.state)
    if shared not in (1, 2, 4, 8):
        return f"{shared} value heads on a key head; it is for 1, 2, 4 or 8"
    return UNALIGNED if (call.z.data_ptr() | call.state.data_ptr()) % 16 else not_hopper(call.qkv.device)


def _refuses_one_by_one(call: Prompt) -> str | None:
    if not is_invariant():
        return "chunks are quicker"
    width = call.state.shape[2]
    return f"keys of {width} channels, wider than {2 * WIDEST_KEY}" if width > 2 * WIDEST_KEY else None


def _never(call: object) -> None:
    return None


def _decode(call: LayerStep) -> Tensor:
    out = torch.empty_like(call.z)
    if out.numel():
        decode.step_hopper(*call[:10], call.unit_eps, call.eps, out)
    return out


def _step_by_step(call: LayerStep) -> Tensor:
    return layer_step_by(LAYER_STEPS, *call)


PREFILL: Routes[Prompt, None] = Routes(
    Route("one by one", _refuses_one_by_one, lambda call: serial.take_serially(*call), alike=True),
    Route("prefill", _refuses_prefill, lambda call: prefill.prefill_hopper(*call)),
    Route("chunks", _refuses_chunks, lambda call: chunks.run_chunks(*call)),
)
CONV: Routes[Convolve, None] = Routes(
    Route("conv, token by token", _refuses_serial, lambda call: conv.convolve_serially(*call)),
    Route("conv, all tokens at once", _never, lambda call: conv.convolve_tiles(*call), alike=True),
)
SCAN: Routes[Scan, None] = Routes(
    Route("scan, in chunks", _refuses_scan_chunks, lambda call: selective.scan_in_chunks(*call)),
    Route("scan, token by token", _never, lambda call: selective.scan_one_by_one(*call), alike=True),
)
LAYER: Routes[LayerStep, Tensor] = Routes(
    Route("decode", _refuses_decode, _decode),
    Route("step by step", _never, _step_by_step, alike=True),
)
ROUTES = {"gated_delta_prefill": PREFILL, "short_conv": CONV, "selective_scan": SCAN, "delta_layer_step": LAYER}
