"""The shapes of large models, in bfloat16: what is timed on a GPU, and which builds of kernels are hot.

They are cases as those of the parity test, but too large for it: one holds up to gigabytes. The benchmark makes them on the
device, and holds each kernel to its reference on these very shapes before it times it. What they launch is compiled without a
GPU, and may not spill registers (`hopper/compile.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from auraflux.ops._cases import Args, Case
from auraflux.ops.attention._latent_cases import down, down_flops, in_bf16, latent_flops, latent_queries, up, up_flops
from auraflux.ops.attention.cases import attention_flops, queries
from auraflux.ops.attention.reference import (
    append_kv,
    attention,
    attention_partials,
    latent_attention,
    latent_output,
    latent_query,
)
from auraflux.ops.delta.cases import conv, prefill, state_flops, state_nbytes, step, whole, whole_nbytes
from auraflux.ops.delta.reference import delta_layer_step, gated_delta_prefill, gated_delta_step, short_conv
from auraflux.ops.linear.reference import add_norm_gate_up, add_norm_linears, add_norm_scores, gate_up_swiglu, linear, linears
from auraflux.ops.moe._expert_cases import some
from auraflux.ops.moe.experts import Experts, SharedExpert
from auraflux.ops.moe.reference import expert_mlp, expert_parts, mixture, route
from auraflux.ops.moe.routing import Routing
from auraflux.ops.turboquant._inputs import (
    append,
    append_nbytes,
    attend,
    attend_flops,
    attend_latent,
    attend_latent_flops,
    attend_latent_nbytes,
    attend_nbytes,
    encoded,
    rope_appended,
    rope_appended_latent,
)
from auraflux.ops.turboquant._inputs import coded as coded_rows
from auraflux.ops.turboquant.arrangement import arrangement_for
from auraflux.ops.turboquant.codebook import BITS
from auraflux.ops.turboquant.reference import (
    append_codes,
    decode,
    encode,
    rope_append_codes,
    rope_append_latent_codes,
    turboquant_attention,
    turboquant_latent_attention,
)
from auraflux.quant import QTensor

BF16 = torch.bfloat16
K = 1024
PAGE = 64
TOL = 5e-3  # relative RMS: weights and results are rounded to bfloat16, 8 bits each
TWICE_ROUNDED = 1e-2  # what lies between two products is rounded too

HEADS = (32, 8)
MAIN_PAIRS = ((4, 4), (8, 4), (4, 2))
# as models are served: keys without centres and scales, the first position and the newest 32 as they are
KEPT: dict[str, Any] = {"calibrated": True, "plain": (1, 32), "plain_dtype": BF16}
OTHER_PAIRS = [pair for pair in product(BITS, BITS) if pair not in MAIN_PAIRS]


def codes(*shape: int, bits: int, group: int = 64) -> QTensor:
    """A random weight or stack of them: quantizing a real one would take longer than all the rest."""
    *stack, rows, width = shape
    packed = torch.randint(-(2**31), 2**31, (*stack, rows, width * bits // 32), dtype=torch.int32)
    scales = ((torch.rand(*stack, rows, width // group) + 0.5) / (width**0.5 * 2 ** (bits - 1))).to(BF16)
    return QTensor(packed, scales, -scales * 2 ** (bits - 1), bits, group, shape)


def mxfp4(rows: int, width: int) -> QTensor:
    packed = torch.randint(-(2**31), 2**31, (rows, width // 8), dtype=torch.int32)
    return QTensor(packed, torch.randint(115, 122, (rows, width // 32), dtype=torch.uint8), None, 4, 32, (rows, width))


# formats that MLX has not, and others whose scales are not in bf16: bits, inputs of a group, dtype of scales, whether there
# are biases
OTHER_FORMATS = {
    "fp8": (8, 128, torch.float32, False),
    "nvfp4": (4, 16, torch.float32, False),
    "q6k": (6, 16, torch.float32, False),
    "q3k": (3, 16, torch.float32, False),
    "iq4": (4, 32, torch.float32, False),
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
        # the highest exponent, which what is no number has, does not occur
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
    """The residual stream, what is to be added to it, and weights of codes or, without bits, in bf16."""
    x, delta = (torch.randn(tokens, width).to(BF16) for _ in range(2))
    weights = [(torch.randn(n, width) * width**-0.5).to(BF16) if bits is None else codes(n, width, bits=bits) for n in rows]
    return {"x": x, "delta": delta, "norm": 1 + 0.1 * torch.randn(width), "eps": 1e-6, "weights": weights}


def gated_stream(tokens: int, width: int, rows: int) -> Args:
    args = from_stream(tokens, width, [rows, rows])
    gate, up = args.pop("weights")
    return {**args, "gate": gate, "up": up}


def products_nbytes(args: Args) -> int:
    """Weights once, and the tokens they are multiplied with."""
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
    """Keys and values of every position once, queries and results."""
    pages = args["pages"]
    row = pages.k.shape[1] * (pages.k.shape[3] + pages.v.shape[3]) * pages.k.element_size()
    return int(pages.lengths.sum()) * row + 2 * args["q"].nbytes


def latent_nbytes(args: Args) -> int:
    pages = args["pages"]
    row = (pages.latent.shape[2] + pages.rope.shape[2]) * pages.latent.element_size()
    return int(pages.lengths.sum()) * row + 2 * args["q_latent"].nbytes + args["q_rope"].nbytes


def half_nbytes(args: Args) -> int:
    """Half of the weight, tokens and results: a head has as many rows for keys as for values."""
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
    """The same with a shared expert as large as the others."""
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
    """All experts but one."""
    return some(routed(tokens, experts()), [3])


def ids_of(args: Args) -> Tensor:
    return args["ids"] if "ids" in args else route.reference(args["scores"], args["routing"])[0]


def moe_nbytes(args: Args) -> int:
    """The experts that are met once, tokens and results."""
    layer = args["experts"]
    size = sum(stack.nbytes for stack in layer.stacks) // layer.count
    return (len(ids_of(args).unique()) + ("shared" in args)) * size + 2 * args["x"].nbytes


def moe_flops(args: Args) -> int:
    layer, shared = args["experts"], len(args["x"]) if "shared" in args else 0
    return 6 * (ids_of(args).numel() + shared) * layer.hidden * layer.inner


def as_cached(make: Callable[..., Args], *sizes: Any, **options: Any) -> Args:
    """Arguments whose codes lie in the order that a cache on their device chooses."""
    args = make(*sizes, **options, page=PAGE, dtype=BF16)
    pages = args["pages"]
    chosen = arrangement_for(pages.table.device, pages.key_bits, pages.value_bits, pages.width, PAGE)
    return {**args, "pages": replace(pages, arrangement=chosen)}


def coded(name: str, lengths: list[int], heads: tuple[int, int], width: int, bits: tuple[int, int], **options: Any) -> Case:
    """Decoding one token of each sequence over codes."""
    make = partial(as_cached, attend, lengths, [1] * len(lengths), heads, width, bits, **options)
    return Case(turboquant_attention, name, make, tol=TOL, nbytes=attend_nbytes, flops=attend_flops)


def dense(name: str, lengths: list[int], new: list[int], heads: tuple[int, int] = HEADS, width: int = 128) -> Case:
    make = partial(queries, lengths, new, heads, width, page=PAGE, dtype=BF16)
    return Case(attention, name, make, tol=TOL, nbytes=dense_nbytes, flops=attention_flops)


def multiplied(name: str, make: Any) -> Case:
    return Case(linear, name, make, tol=TOL, flops=linear_flops)


LINEAR = [
    *(multiplied(f"4bit-8192x8192-{t}", partial(product_of, t, 8192, 8192, 4)) for t in (1, 8, 16, 64, 2048)),
    multiplied("4bit-4096x14336-1", partial(product_of, 1, 4096, 14336, 4)),
    multiplied("4bit-14336x4096-1", partial(product_of, 1, 14336, 4096, 4)),
    multiplied("4bit-7168x16384-1", partial(product_of, 1, 7168, 16384, 4)),
    multiplied("4bit-8192x8256-1", partial(product_of, 1, 8192, 8256, 4)),
    *(multiplied(f"{bits}bit-8192x8192-1", partial(product_of, 1, 8192, 8192, bits)) for bits in (8, 6, 5, 3, 2)),
    multiplied("mxfp4-8192x8192-1", partial(mx_product, 1, 8192, 8192)),
    *(multiplied(f"{name}-4096x14336-1", partial(other_product, 1, 4096, 14336, name)) for name in OTHER_FORMATS),
    *(
        multiplied(f"{name}-{rows}x{width}-{t}", partial(other_product, t, rows, width, name))
        for name in ("fp8", "nvfp4", "q6k")
        for t, rows, width in ((1, 14336, 4096), (2048, 4096, 14336))
    ),
]

# products as models ask for them: with the residual stream and its norm, several at once
JOINED = [
    *(
        Case(
            add_norm_linears,
            f"qkv-4096-{t}",
            partial(from_stream, t, 4096, [4096, 1024, 1024]),
            tol=TWICE_ROUNDED,
            nbytes=products_nbytes,
        )
        for t in (1, 8, 32, 128, 2048)
    ),
    *(
        Case(
            add_norm_gate_up,
            f"4096x14336-{t}",
            partial(gated_stream, t, 4096, 14336),
            tol=TWICE_ROUNDED,
            nbytes=products_nbytes,
        )
        for t in (1, 8, 32, 128, 2048)
    ),
    *(
        Case(add_norm_scores, f"128-of-2048-{t}", partial(from_stream, t, 2048, [128], None), tol=TOL, nbytes=products_nbytes)
        for t in (1, 32)
    ),
    *(multiplied(f"6bit-4096x4096-{t}", partial(product_of, t, 4096, 4096, 6)) for t in (8, 32)),
]

ATTENTION = [
    *(dense(f"decode-{n}k", [n * K], [1]) for n in (32, 128)),
    dense("decode-8x32k", [32 * K] * 8, [1] * 8),
    *(dense(f"prefill-{n}k", [n * K], [n * K]) for n in (2, 8)),
    *(dense(f"piece-{new}-of-4k", [4 * K], [new]) for new in (64, 128, 256)),
    Case(append_kv, "one-token", partial(new_tokens, 1, 1000, 8, 128), nbytes=append_kv_nbytes),
    Case(append_kv, "2048-tokens", partial(new_tokens, 2048, 2048, 8, 128), nbytes=append_kv_nbytes),
]

CODED = [
    *(
        coded(f"k{k}v{v}-{name}", lengths, HEADS, 128, (k, v))
        for k, v in MAIN_PAIRS
        for name, lengths in (("128k", [128 * K]), ("32k", [32 * K]), ("8x32k", [32 * K] * 8))
    ),
    *(
        coded(f"k{k}v{v}-kept-{name}", lengths, HEADS, 128, (k, v), **KEPT)
        for k, v in MAIN_PAIRS[:2]
        for name, lengths in (("128k", [128 * K]), ("32k", [32 * K]), ("8x32k", [32 * K] * 8))
    ),
    coded("k4v4-64x64-sinks-128k", [128 * K], (64, 8), 64, (4, 4), sinks=True),
    coded("k4v4-16x256-128k", [128 * K], (16, 2), 256, (4, 4)),
    Case(
        turboquant_attention,
        "k8v4-prefill-2k",
        partial(as_cached, attend, [2 * K], [2 * K], HEADS, 128, (8, 4)),
        tol=TOL,
        nbytes=attend_nbytes,
        flops=attend_flops,
    ),
    *(
        Case(
            append_codes,
            f"{name}-k{k}v{v}",
            partial(as_cached, append, [length], [n], 8, 128, bits=(k, v)),
            nbytes=append_nbytes,
        )
        for name, length, n in (("one-token", 1000, 1), ("2048-tokens", 2048, 2048))
        for k, v in MAIN_PAIRS[:2]
    ),
    Case(
        turboquant_attention,
        "k4v4-kept-prefill-2k",
        partial(as_cached, attend, [2 * K], [2 * K], HEADS, 128, (4, 4), **KEPT),
        tol=TWICE_ROUNDED,
        nbytes=attend_nbytes,
        flops=attend_flops,
    ),
    Case(
        rope_append_codes,
        "one-token-kept-k4v4",
        partial(as_cached, rope_appended, [1000], [1], HEADS, 128, bits=(4, 4), **KEPT),
        tol=TOL,
        nbytes=append_nbytes,
    ),
    Case(
        rope_append_codes,
        "one-token-k8v4",
        partial(as_cached, rope_appended, [1000], [1], HEADS, 128, bits=(8, 4)),
        tol=TOL,
        nbytes=append_nbytes,
    ),
]

MOE = [
    Case(made, f"{t}-tokens" if t > 1 else "one-token", partial(make, t), tol=TWICE_ROUNDED, nbytes=moe_nbytes, flops=moe_flops)
    for made, make in (
        (expert_mlp, lambda t: routed(t, experts())),
        (mixture, lambda t: moe(t, experts())),
    )
    for t in (1, 64, 4096)
]
MOE += [
    Case(mixture, name, make, tol=TWICE_ROUNDED, nbytes=moe_nbytes, flops=moe_flops)
    for name, make in (
        ("wide-one-token", lambda: moe(1, experts(64, 7168, 2048), BY_SIGMOID)),
        ("shared-one-token", lambda: with_shared(moe(1, experts(inner=512)))),
        ("wide-shared-one-token", lambda: with_shared(moe(1, experts(64, 7168, 2048), BY_SIGMOID))),
    )
]

DELTA = [
    *(
        Case(
            gated_delta_step,
            f"batch-{b}",
            partial(step, b, 32, 16, dtype=BF16),
            tol=TOL,
            flops=state_flops,
            nbytes=state_nbytes,
        )
        for b in (1, 8, 32)
    ),
    *(
        Case(delta_layer_step, f"batch-{b}", partial(whole, b, 32, 16), tol=TWICE_ROUNDED, nbytes=whole_nbytes)
        for b in (1, 8, 32)
    ),
    *(
        Case(
            gated_delta_prefill,
            f"{heads}-heads-{n}k",
            partial(prefill, n * K, heads=heads, key_heads=16, dtype=BF16),
            tol=TWICE_ROUNDED,
            flops=state_flops,
            nbytes=state_nbytes,
        )
        for heads in (32, 64)
        for n in (2, 8, 32)
    ),
]

LATENT = [
    *(
        Case(
            latent_attention,
            f"{heads}-heads-32k",
            partial(latent_queries, [32 * K], [1], heads, 512, 64, PAGE, BF16),
            tol=TOL,
            nbytes=latent_nbytes,
            flops=latent_flops,
        )
        for heads in (16, 128)
    ),
    *(
        Case(
            turboquant_latent_attention,
            f"8bit-{heads}-heads-32k",
            partial(attend_latent, [32 * K], [1], heads, 512, 64, dtype=BF16, bits=8, page=PAGE, cache=BF16),
            tol=TOL,
            nbytes=attend_latent_nbytes,
            flops=attend_latent_flops,
        )
        for heads in (16, 128)
    ),
]

LATENT += [
    *(
        Case(
            turboquant_latent_attention,
            f"8bit-kept-{heads}-heads-32k",
            partial(attend_latent, [32 * K], [1], heads, 512, 64, dtype=BF16, bits=8, page=PAGE, cache=BF16, plain=(1, 32)),
            tol=TOL,
            nbytes=attend_latent_nbytes,
            flops=attend_latent_flops,
        )
        for heads in (16, 128)
    ),
    Case(
        rope_append_latent_codes,
        "one-token-128-heads",
        partial(rope_appended_latent, [1000], [1], 128, (128, 64, 512), dtype=BF16, bits=8, page=PAGE, cache=BF16),
        tol=TOL,
    ),
]

LATENT += [
    Case(
        made, f"{heads}-heads-{t}", partial(in_bf16, make, name, t, heads, 128, 128, 512), tol=TOL, nbytes=half_nbytes, flops=f
    )
    for made, make, name, f in ((latent_query, up, "q_nope", up_flops), (latent_output, down, "v", down_flops))
    for heads, t in ((128, 1), (16, 1), (128, 8), (128, 32), (128, 2048))
]

OTHERS = [coded(f"k{k}v{v}-32k", [32 * K], HEADS, 128, (k, v)) for k, v in OTHER_PAIRS]

CASES: list[Case] = [*LINEAR, *JOINED, *ATTENTION, *CODED, *MOE, *DELTA, *LATENT, *OTHERS]

# what large models launch on older GPUs, in other formats or seldom; it is not timed
SELDOM: list[Case] = [
    Case(short_conv, "few-tokens", lambda: conv(2, 9, channels=8192, dtype=BF16)),
    Case(encode, "8bit", lambda: encoded(2 * K, 8, 128, bits=8, dtype=BF16)),
    Case(decode, "8bit", lambda: coded_rows(2 * K, 8, bits=8, width=128, seed=0)),
    Case(linear, "dense", lambda: {"x": torch.randn(1, 2048).to(BF16), "weight": torch.randn(128, 2048).to(BF16)}),
    Case(linears, "three", lambda: {"x": torch.randn(1, 4096).to(BF16), "weights": [codes(4096, 4096, bits=4)] * 3}),
    Case(gate_up_swiglu, "two", lambda: gated(1, 14336, 4096)),
    Case(attention_partials, "decode-32k", partial(queries, [32 * K], [1], HEADS, 128, page=PAGE, dtype=BF16)),
    *(Case(expert_mlp, f"{e}-experts", partial(routed_to, 160, e)) for e in (16, 32, 64)),
    *(Case(expert_parts, f"{t}-tokens", partial(some_of, t)) for t in (1, 64, 2 * K)),
]
HOT = [*CASES, *SELDOM]
