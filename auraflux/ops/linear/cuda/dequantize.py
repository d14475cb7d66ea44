"""Weights of 4 and 8 bits dequantized to bf16 for cuBLAS: bound by stores, so that few instructions per pair of codes suffice.

An integer below 256 reinterpreted as bf16 bits is itself times 2**-133: times 2**127 it is code / 64.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.device import interpreted
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv
from auraflux.ops.linear.cuda.dense import dequantized
from auraflux.quant import QTensor

BLOCK = 512  # words per program


def _ptx(bits: int) -> Any:
    """Return PTX for the weights of a word, two per result.

    In: the word, 64 times its scale and its bias, these twice in a word.
    """
    count = 16 // bits
    text = "{.reg .b32 low,high,r,up,zero; mov.b32 up,0x7F007F00; mov.b32 zero,0;"
    if bits == 4:
        text += f"and.b32 low,${count},0x0F0F0F0F; shr.u32 high,${count},4; and.b32 high,high,0x0F0F0F0F;"
        # byte n of each; a selector from 8 on repeats a byte's sign, which is 0
        pairs = [f"prmt.b32 r,low,high,{hex(0xC480 + 0x1111 * n)};" for n in range(count)]
    else:
        pairs = [f"prmt.b32 r,${count},zero,{hex(0x4140 + 0x202 * n)};" for n in range(count)]
    for n, pair in enumerate(pairs):
        text += pair + f"fma.rn.bf16x2 r,r,up,zero; fma.rn.bf16x2 ${n},r,${count + 1},${count + 2};"
    return tl.constexpr(text + "}")


FOUR, EIGHT = _ptx(4), _ptx(8)


@triton.jit
def dequantize_bf16(packed, scales, biases, out, words, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    EACH: tl.constexpr = 16 // BITS
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    word = tl.load(packed + at, mask=at < words, other=0)
    group = at // (GROUP * BITS // 32)
    scale = (tl.load(scales + group, mask=at < words, other=0.0).to(tl.float32) * 64.0).to(tl.bfloat16)
    bias = tl.load(biases + group, mask=at < words, other=0.0)
    s, b = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF, bias.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    args = [word, s | (s << 16), b | (b << 16)]
    if BITS == 4:
        kinds: tl.constexpr = (tl.int32,) * 4
        p, q, r, t = tl.inline_asm_elementwise(FOUR, "=&r,=&r,=&r,=&r,r,r,r", args, kinds, is_pure=True, pack=1)
        pairs = tl.join(tl.join(p, r), tl.join(q, t))
    else:
        p, q = tl.inline_asm_elementwise(EIGHT, "=&r,=&r,r,r,r", args, (tl.int32,) * 2, is_pure=True, pack=1)
        pairs = tl.join(p, q)
    to = first * EACH + tl.arange(0, BLOCK * EACH)
    tl.store(out.to(tl.pointer_type(tl.int32)) + to, pairs.reshape(BLOCK * EACH), mask=to < words * EACH)


def refuses_bf16(weight: QTensor, dtype: torch.dtype) -> str | None:
    """Return why a weight is not dequantized by this kernel; None if it is."""
    if weight.bits not in (4, 8) or weight.biases is None:
        return "not affine with 4 or 8 bits"
    if {dtype, weight.scales.dtype, weight.biases.dtype} != {torch.bfloat16}:
        return "activations, scales and biases are not all bf16"
    return "Triton's interpreter does not run its PTX" if interpreted() else None


def dequantized_bf16(weight: QTensor) -> Tensor:
    out = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
    if words := weight.packed.numel():
        grid = (cdiv(words, BLOCK),)
        launch(dequantize_bf16, grid)(
            weight.packed, weight.scales, weight.biases, out, words, weight.bits, weight.group, BLOCK, num_warps=4
        )
    return out


def dense_weight(weight: QTensor, dtype: torch.dtype) -> Tensor:
    """Return a weight dequantized, by the kernel above where it takes the weight."""
    return dequantized(weight, dtype) if refuses_bf16(weight, dtype) else dequantized_bf16(weight)
