"""Bfloat16 arguments with the shapes of large models, and their memory traffic and FLOPs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from auraflux.ops._cases import Args
from auraflux.ops.attention.cases import queries
from auraflux.ops.moe._expert_cases import some
from auraflux.ops.moe.experts import Experts, SharedExpert
from auraflux.ops.moe.reference import route
from auraflux.ops.moe.routing import Routing
from auraflux.ops.turboquant.arrangement import arrangement_for
from auraflux.quant import QTensor

BF16 = torch.bfloat16
PAGE = 64


def codes(*shape: int, bits: int, group: int = 64) -> QTensor:
    """Return a random quantized weight or stack of weights, made without the cost of quantizing one."""
    *stack, rows, width = shape
    packed = torch.randint(-(2**31), 2**31, (*stack, rows, width * bits // 32), dtype=torch.int32)
    scales = ((torch.rand(*stack, rows, width // group) + 0.5) / (width**0.5 * 2 ** (bits - 1))).to(BF16)
    return QTensor(packed, scales, -scales * 2 ** (bits - 1), bits, group, shape)


def mxfp4(rows: int, width: int) -> QTensor:
    packed = torch.randint(-(2**31), 2**31, (rows, width // 8), dtype=torch.int32)
    return QTensor(packed, torch.randint(115, 122, (rows, width // 32), dtype=torch.uint8), None, 4, 32, (rows, width))


# formats that MLX lacks or whose scales are not bf16: bits, group size, dtype of scales, has biases
OTHER_FORMATS = {
    "fp8": (8, 128, torch.float32, False),
    "nvfp4": (4, 16, torch.float32, False),
    "q6k": (6, 16, torch.float32, False),
    "q3k": (3, 16, torch.float32, False),
    "iq4": (4, 32, torch.float32, False),
    "iq4_nl": (4, 32, torch.float16, False),
    "q2k": (2, 16, torch.float32, True),
    "q4k": (4, 32, torch.float32, True),
    "q5k": (5, 32, torch.float32, True),
    "q8_0": (8, 32, torch.float16, True),
    "tq": (2, 128, torch.float16, True),
}


def other_codes(rows: int, width: int, name: str) -> QTensor:
    bits, group, dtype, biased = OTHER_FORMATS[name]
    packed = torch.randint(-(2**31), 2**31, (rows, width * bits // 32), dtype=torch.int32)
    if name == "fp8":
        # clear the top exponent bit, so that no code is NaN
        packed &= -0x40404041
    scales = ((torch.rand(rows, width // group) + 0.5) / (width**0.5 * 2 ** (bits - 1))).to(dtype)
    return QTensor(packed, scales, -scales * 2 ** (bits - 1) if biased else None, bits, group, (rows, width))


def other_product(tokens: int, rows: int, width: int, name: str) -> Args:
    return {"x": torch.randn(tokens, width).to(BF16), "weight": other_codes(rows, width, name)}


def product_of(tokens: int, rows: int, width: int, bits: int) -> Args:
    return {"x": torch.randn(tokens, width).to(BF16), "weight": codes(rows, width, bits=bits)}


def mx_product(tokens: int, rows: int, width: int) -> Args:
    return {"x": torch.randn(tokens, width).to(BF16), "weight": mxfp4(rows, width)}


def gated(tokens: int, rows: int, width: int) -> Args:
    return {"x": torch.randn(tokens, width).to(BF16), "gate": codes(rows, width, bits=4), "up": codes(rows, width, bits=4)}


def from_stream(tokens: int, width: int, rows: list[int], bits: int | None = 4) -> Args:
    """Return a residual stream, its update, a norm and weights quantized to `bits`, or bf16 if None."""
    x, delta = (torch.randn(tokens, width).to(BF16) for _ in range(2))
    weights = [(torch.randn(n, width) * width**-0.5).to(BF16) if bits is None else codes(n, width, bits=bits) for n in rows]
    return {"x": x, "delta": delta, "norm": 1 + 0.1 * torch.randn(width), "eps": 1e-6, "weights": weights}


def gated_stream(tokens: int, width: int, rows: int) -> Args:
    args = from_stream(tokens, width, [rows, rows])
    gate, up = args.pop("weights")
    return {**args, "gate": gate, "up": up}


def products_nbytes(args: Args) -> int:
    """Count the weights and the activations, each read once."""
    weights = args["weights"] if "weights" in args else [args["gate"], args["up"]]
    return sum(weight.nbytes for weight in weights) + args["x"].nbytes


def linear_flops(args: Args) -> int:
    return 2 * args["x"].numel() * args["weight"].shape[0]


def new_tokens(count: int, length: int, heads: int, width: int) -> Args:
    args = queries([length], [count], (heads, heads), width, page=PAGE, dtype=BF16)
    k, v = (torch.randn(count, heads, width).to(BF16) for _ in range(2))
    return {"k": k, "v": v, "pages": args["pages"], "starts": args["starts"]}


def append_kv_nbytes(args: Args) -> int:
    return 2 * (args["k"].nbytes + args["v"].nbytes)


def dense_nbytes(args: Args) -> int:
    """Count the keys and values of every position, the queries and the outputs."""
    pages = args["pages"]
    row = pages.k.shape[1] * (pages.k.shape[3] + pages.v.shape[3]) * pages.k.element_size()
    return int(pages.lengths.sum()) * row + 2 * args["q"].nbytes


def latent_nbytes(args: Args) -> int:
    pages = args["pages"]
    row = (pages.latent.shape[2] + pages.rope.shape[2]) * pages.latent.element_size()
    return int(pages.lengths.sum()) * row + 2 * args["q_latent"].nbytes + args["q_rope"].nbytes


def half_nbytes(args: Args) -> int:
    """Count half of the weight, whose heads have as many rows for keys as for values, the inputs and the outputs."""
    x = args["q_nope"] if "q_nope" in args else args["v"]
    width, rows = args["weight"].shape[1], args["weight"].shape[0] // x.shape[1] // 2
    return args["weight"].nbytes // 2 + x.shape[0] * x.shape[1] * (width + rows) * x.element_size()


EXPERTS, HIDDEN, INNER = 128, 2048, 768
ROUTING = Routing(8, "softmax", renormalize=True)
BY_SIGMOID = Routing(8, "sigmoid", renormalize=True)


def experts(count: int = EXPERTS, hidden: int = HIDDEN, inner: int = INNER) -> Experts:
    gate, up = (codes(count, inner, hidden, bits=4) for _ in range(2))
    return Experts(gate, up, codes(count, hidden, inner, bits=4))


def moe(tokens: int, layer: Experts, routing: Routing = ROUTING) -> Args:
    x, h = (torch.randn(tokens, layer.hidden).to(BF16) for _ in range(2))
    scores = torch.randn(tokens, layer.count).to(BF16)
    return {"x": x, "scores": scores, "routing": routing, "experts": layer, "h": h}


def with_shared(args: Args) -> Args:
    """Return the arguments with a shared expert of the routed experts' size."""
    layer = args["experts"]
    gate, up, down = (stack[0] for stack in experts(1, layer.hidden, layer.inner).stacks)
    return {**args, "shared": SharedExpert(gate, up, down), "shared_gate": torch.randn(len(args["x"])).to(BF16)}


def routed(tokens: int, layer: Experts) -> Args:
    args = moe(tokens, layer)
    ids, weights = route.reference(args["scores"], args["routing"])
    return {"x": args["x"], "ids": ids, "weights": weights, "experts": layer}


def routed_to(tokens: int, count: int) -> Args:
    return routed(tokens, experts(count))


def some_of(tokens: int) -> Args:
    """Return arguments for all experts but one."""
    return some(routed(tokens, experts()), [3])


def ids_of(args: Args) -> Tensor:
    return args["ids"] if "ids" in args else route.reference(args["scores"], args["routing"])[0]


def moe_nbytes(args: Args) -> int:
    """Count the activated experts once, the tokens and the outputs."""
    layer = args["experts"]
    size = sum(stack.nbytes for stack in layer.stacks) // layer.count
    return (len(ids_of(args).unique()) + ("shared" in args)) * size + 2 * args["x"].nbytes


def moe_flops(args: Args) -> int:
    layer, shared = args["experts"], len(args["x"]) if "shared" in args else 0
    return 6 * (ids_of(args).numel() + shared) * layer.hidden * layer.inner


def as_cached(make: Callable[..., Args], *sizes: Any, **options: Any) -> Args:
    """Return arguments whose codes have the arrangement that a cache on their device uses."""
    args = make(*sizes, **options, page=PAGE, dtype=BF16)
    pages = args["pages"]
    chosen = arrangement_for(pages.table.device, pages.key_bits, pages.value_bits, pages.width, PAGE)
    return {**args, "pages": replace(pages, arrangement=chosen)}
