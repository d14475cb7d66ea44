"""Cases with the shapes of large models, in bfloat16: the GPU benchmark, and the kernel variants on the critical path.

They are cases like those of the parity test but take up to gigabytes. The benchmark makes their arguments on the device and
checks each kernel against its reference on these shapes before timing it. The kernels they launch are compiled without a GPU
and may not spill registers (`gpu/compile.py`).
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch

from auraflux.ops._cases import Args, Case
from auraflux.ops._gpu_inputs import (
    BF16,
    BY_SIGMOID,
    OTHER_FORMATS,
    PAGE,
    append_kv_nbytes,
    as_cached,
    codes,
    dense_nbytes,
    experts,
    from_stream,
    gated,
    gated_stream,
    half_nbytes,
    latent_nbytes,
    linear_flops,
    moe,
    moe_flops,
    moe_nbytes,
    mx_product,
    new_tokens,
    other_product,
    product_of,
    products_nbytes,
    routed,
    routed_to,
    some_of,
    with_shared,
)
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
from auraflux.ops.delta.cases import conv, layer_inputs, layer_nbytes, prefill, state_flops, state_nbytes, step
from auraflux.ops.delta.reference import delta_layer_step, gated_delta_prefill, gated_delta_step, short_conv
from auraflux.ops.linear.reference import add_norm_gate_up, add_norm_linears, add_norm_scores, gate_up_swiglu, linear, linears
from auraflux.ops.lora.cases import adapted
from auraflux.ops.lora.cases import gated as lora_gated
from auraflux.ops.lora.cases import products as lora_products
from auraflux.ops.lora.reference import add_lora, lora_gate_up, lora_linears
from auraflux.ops.moe.reference import expert_mlp, expert_parts, mixture
from auraflux.ops.turboquant.cases.inputs import (
    append,
    append_nbytes,
    appended_and_attended,
    attend,
    attend_flops,
    attend_nbytes,
    encoded,
    rope_appended,
)
from auraflux.ops.turboquant.cases.inputs import coded as coded_rows
from auraflux.ops.turboquant.cases.latent_inputs import (
    attend_latent,
    attend_latent_flops,
    attend_latent_nbytes,
    rope_appended_latent,
)
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
from auraflux.ops.turboquant.reference_new_token import rope_append_attention

K = 1024
TOL = 5e-3  # relative RMS: weights and results are rounded to bfloat16, 8 bits each
TWICE_ROUNDED = 1e-2  # the intermediate between two products is rounded too

HEADS = (32, 8)
MAIN_PAIRS = ((4, 4), (8, 4), (4, 2))
# as models are served: calibrated keys, one sink token and a recent window of 32 in full precision
FULL_PRECISION: dict[str, Any] = {"calibrated": True, "full_precision": (1, 32), "full_precision_dtype": BF16}
OTHER_PAIRS = [pair for pair in product(BITS, BITS) if pair not in MAIN_PAIRS]


def coded(name: str, lengths: list[int], heads: tuple[int, int], width: int, bits: tuple[int, int], **options: Any) -> Case:
    """Return a case that decodes one token of each sequence over a quantized cache."""
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

# products fused with the residual stream and its norm, several at once
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
    *(dense(f"chunk-{new}-of-4k", [4 * K], [new]) for new in (64, 128, 256)),
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
        coded(f"k{k}v{v}-full-precision-{name}", lengths, HEADS, 128, (k, v), **FULL_PRECISION)
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
        "k4v4-full-precision-prefill-2k",
        partial(as_cached, attend, [2 * K], [2 * K], HEADS, 128, (4, 4), **FULL_PRECISION),
        tol=TWICE_ROUNDED,
        nbytes=attend_nbytes,
        flops=attend_flops,
    ),
    *(
        Case(
            rope_append_attention,
            f"{name}-k{bits[0]}v{bits[1]}",
            partial(appended_and_attended, length, HEADS, 128, bits, dtype=BF16, **options),
            tol=TOL,
            nbytes=attend_nbytes,
            flops=attend_flops,
        )
        for bits in MAIN_PAIRS[:2]
        for name, length, options in (("1k", K, {}), ("full-precision-1k", K, FULL_PRECISION), ("32k", 32 * K, {}))
    ),
    Case(
        rope_append_codes,
        "one-token-full-precision-k4v4",
        partial(as_cached, rope_appended, [1000], [1], HEADS, 128, bits=(4, 4), **FULL_PRECISION),
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
        Case(delta_layer_step, f"batch-{b}", partial(layer_inputs, b, 32, 16), tol=TWICE_ROUNDED, nbytes=layer_nbytes)
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
            f"8bit-full-precision-{heads}-heads-32k",
            partial(
                attend_latent, [32 * K], [1], heads, 512, 64, dtype=BF16, bits=8, page=PAGE, cache=BF16, full_precision=(1, 32)
            ),
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

# rank 16 on the projections of a model of 8B parameters: q, k, v; gate and up; down; after products, and with them
PROJECTIONS: list[tuple[Any, str, Callable[..., Args], tuple[Any, ...], bool]] = [
    (add_lora, "qkv", adapted, (4096, (4096, 1024, 1024)), True),
    (add_lora, "down-rank-64", adapted, (14336, (4096,), (64,)), False),
    (lora_linears, "qkv", partial(lora_products, bits=4), (4096, (4096, 1024, 1024)), True),
    (lora_linears, "output", partial(lora_products, bits=4), (4096, (4096,)), False),
    (lora_linears, "down", partial(lora_products, bits=4), (14336, (4096,)), False),
    (lora_gate_up, "gate-up", partial(lora_gated, bits=4), (4096, 14336), True),
]
LORA = [
    Case(op, f"{name}-{tokens}", partial(make, tokens, *sizes, dtype=BF16, norm=normed, delta=normed), tol=TWICE_ROUNDED)
    for op, name, make, sizes, normed in PROJECTIONS
    for tokens in (1, 8)
]

CASES: list[Case] = [*LINEAR, *LORA, *JOINED, *ATTENTION, *CODED, *MOE, *DELTA, *LATENT, *OTHERS]

# launched on older GPUs, with other formats or rarely; not timed
RARE: list[Case] = [
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
CRITICAL = [*CASES, *RARE]
