"""Inputs for `linear`: every width, group and scale type, one token to many, both row orders, dense weights."""

from functools import partial
from typing import Any

import torch

from auraflux.ops._cases import Case
from auraflux.ops.linear._inputs import (
    BF16,
    F16,
    F32,
    broken,
    broken_input,
    coded,
    dense,
    flops,
    grid_product,
    large_format,
    large_product,
    product,
    zeros,
)
from auraflux.ops.linear.reference import (
    linear,
)
from auraflux.quant import grids

FAST = 1e-2  # quantizing activations to int8 per group has a relative RMS error of 0.6%


def linear_case(name: str, make, **options) -> Case:
    return Case(linear, name, make, flops=flops, **options)


def contracts(name: str, make, **options) -> list[Case]:
    return [linear_case(name, make, **options), linear_case(f"{name}-fast", make, exact=False, tol=FAST, **options)]


# each compiles a kernel, so a few stand for all: every width, group and type of scale occurs
FORMATS = [*((bits, 64, BF16) for bits in (2, 3, 4, 5, 6, 8)), (4, 32, F16), (2, 128, F32)]

# tokens, rows, inputs, bits, group size (0: MXFP4), for the any-format kernels on Hopper: complete and partial runs of columns,
# scales in complete words or not, four warps and eight
CODED = [
    *((1, 48, width, bits, 64) for bits, width in ((2, 704), (3, 640), (3, 704), (4, 1088), (5, 1280), (6, 320), (8, 576))),
    *((1, 32, width, bits, group) for bits, group, width in ((2, 128, 1152), (8, 128, 1152), (4, 32, 544), (8, 32, 1120))),
    (1, 32, 352, 4, 0),
    # too large for Triton's interpreter
    (1, 128, 8192, 2, 64),
    (1, 48, 8192, 8, 64),
    (1, 112, 4096, 4, 32),
    (1, 64, 4096, 8, 32),
    (1, 128, 4096, 4, 0),
    (1, 176, 2880, 4, 0),
    (2, 176, 2880, 4, 0),
    *((tokens, 48, 640, bits, 64) for tokens, bits in ((11, 2), (8, 3), (5, 5), (16, 6))),
    (9, 32, 544, 4, 0),
]

# tokens, rows, inputs, bits, group size
TILED = [
    (17, 128, 512, 4, 64),
    (32, 1, 192, 4, 64),
    (33, 333, 704, 4, 32),
    (64, 65, 1152, 4, 128),
    (100, 200, 96, 4, 32),
    (129, 130, 2112, 4, 64),
    (300, 257, 640, 4, 128),
    (2, 63, 128, 8, 64),
    (40, 200, 544, 8, 32),
    (70, 129, 1152, 8, 128),
    (260, 100, 320, 8, 64),
]
# sizes for which tiles are scheduled in each of the other ways
TILED_LARGE = [
    (520, 1000, 192, 4, 64),
    (520, 200, 4160, 4, 64),
    (17, 17000, 128, 4, 32),
    (40, 17000, 192, 4, 32),
    (300, 9000, 128, 4, 128),
    (100, 200, 1152, 4, 128),
    (520, 4100, 128, 4, 64),
    (200, 5000, 4160, 4, 64),
    (520, 1000, 128, 8, 64),
    (520, 200, 2112, 8, 64),
    (520, 2100, 128, 8, 32),
]
# formats that MLX lacks
BLOCKS: list[tuple[str, int, dict[str, Any]]] = [
    ("q6k", 6, {"group": 16, "kind": "centred"}),
    ("q3k", 3, {"group": 16, "kind": "centred"}),
    ("q2k", 2, {"group": 16, "scales": F32}),
    ("iq4", 4, {"group": 32, "kind": "iq4"}),
    ("iq4_nl", 4, {"group": 32, "kind": "iq4_nl"}),
    ("q4_0", 4, {"group": 32, "kind": "q4_0"}),
    ("nvfp4", 4, {"group": 16, "kind": "nvfp4"}),
]
# and others whose scales are not bf16: on Hopper the bits select the kernel for one bf16 token
UNITS: list[tuple[str, int, dict[str, Any]]] = [
    *BLOCKS,
    ("fp8", 8, {"group": 128, "kind": "fp8"}),
    ("q4k", 4, {"group": 32, "scales": F32}),
    ("q5k", 5, {"group": 32, "scales": F32}),
    ("q8_0", 8, {"group": 32, "scales": F16}),
    ("tq", 2, {"group": 128, "scales": F16}),
    ("awq", 4, {"group": 128, "scales": F16}),
]

# bits, group, scales, has biases: formats with distinct speeds for one token
TIMED: dict[str, tuple[int, int, torch.dtype, bool]] = {
    "3bit": (3, 64, BF16, True),
    "q8_0": (8, 32, F16, True),
    "q6k": (6, 16, F32, False),
    "q4k": (4, 32, F32, True),
    "q3k": (3, 16, F32, False),
    "q2k": (2, 16, F32, True),
    "tq": (2, 128, F16, True),
    "iq4": (4, 32, F32, False),
    "iq4_nl": (4, 32, F16, False),
    "nvfp4": (4, 16, F32, False),
    "mxfp4": (4, 32, torch.uint8, False),
    "fp8": (8, 128, F32, False),
}

LINEAR_CASES = [
    linear_case("4bit-1", lambda: large_product(1, 4), exact=False, tol=FAST, bench=True),
    linear_case("8bit-1", lambda: large_product(1, 8), exact=False, tol=FAST, bench=True),
    linear_case("2bit-1", lambda: large_product(1, 2), exact=False, tol=FAST, bench=True),
    linear_case("4bit-64", lambda: large_product(64, 4), exact=False, tol=FAST, bench=True),
    linear_case("4bit-1-exact", lambda: large_product(1, 4), bench=True),
    linear_case("4bit-64-exact", lambda: large_product(64, 4), bench=True),
    linear_case("bf16-1", lambda: dense(1, 4096, 4096, BF16), bench=True),
    *[
        linear_case(f"format-{name}", lambda f=form: large_format(*f), exact=False, tol=FAST, bench=True)
        for name, form in TIMED.items()
    ],
    *[
        linear_case(
            f"format-{name}-64",
            lambda f=TIMED[name]: large_format(f[0], f[1], f[2], f[3], 64, 2048, 2048),
            exact=False,
            tol=FAST,
            bench=True,
            slow=True,
        )
        for name in ("q4k", "iq4", "nvfp4", "mxfp4", "fp8")
    ],
    *[
        case
        for bits, group, scales in FORMATS
        for tokens in (1, 29)
        for case in contracts(
            f"{bits}bit-g{group}-{tokens}",
            lambda t=tokens, b=bits, g=group, s=scales: product(t, 100, 256, b, group=g, scales=s),
        )
    ],
    *contracts("mxfp4-1", lambda: product(1, 64, 320, 4, group=32, kind="mxfp4")),
    *contracts("mxfp4-21", lambda: product(21, 64, 320, 4, group=32, kind="mxfp4")),
    *[
        case
        for tokens, group in ((1, 128), (21, 128), (3, 32))
        for case in contracts(f"fp8-g{group}-{tokens}", lambda t=tokens, g=group: product(t, 100, 256, 8, group=g, kind="fp8"))
    ],
    *[
        case
        for name, bits, options in BLOCKS
        for tokens in (1, 29)
        for case in contracts(f"{name}-{tokens}", lambda t=tokens, b=bits, o=options: product(t, 50, 96, b, **o))
    ],
    *[
        linear_case(
            f"bf16-{name}-{tokens}x{rows}x{width}",
            lambda t=tokens, r=rows, w=width, b=bits, o=options: product(t, r, w, b, dtype=BF16, **o),
            tol=4e-3,
            slow=(name, width) != ("q2k", 384),
        )
        for name, bits, options in UNITS
        for tokens, rows, width in ((1, 48, 384), (1, 64, 2048), (1, 33, 640), (7, 48, 384))
    ],
    *[
        linear_case(f"{kind}-{tokens}", lambda t=tokens, k=kind: grid_product(t, 50, 512, k))
        for kind in grids.FORMATS
        for tokens in (1, 8, 64)
    ],
    *[
        linear_case(f"bf16-{kind}-{tokens}", lambda t=tokens, k=kind: grid_product(t, 50, 768, k, BF16), tol=4e-3)
        for kind in grids.FORMATS
        for tokens in (1, 7)
    ],
    *[
        linear_case(f"format-{kind}", lambda k=kind: grid_product(1, 11008, 4096, k), exact=False, tol=FAST, bench=True)
        for kind in grids.FORMATS
    ],
    linear_case("f16-q6k", lambda: product(1, 48, 384, 6, F16, group=16, kind="centred"), tol=1e-3, slow=True),
    *contracts("q3k-row-order", lambda: product(5, 50, 96, 3, group=16, kind="centred", lanes=1)),
    *contracts("5bit-row-order", lambda: product(3, 50, 192, 5, lanes=1)),
    *contracts("6bit-row-order", lambda: product(17, 50, 192, 6, lanes=1)),
    linear_case("fp8-row-order", lambda: product(3, 50, 192, 8, kind="fp8", lanes=1)),
    *contracts("row-order-1", lambda: product(1, 333, 192, 4, lanes=1)),
    *contracts("row-order-13", lambda: product(13, 333, 192, 4, lanes=1)),
    *contracts("mxfp4-row-order", lambda: product(3, 50, 96, 4, group=32, kind="mxfp4", lanes=1)),
    linear_case("one-row", lambda: product(5, 1, 64, 4)),
    linear_case("no-tokens", lambda: product(0, 64, 64, 4)),
    linear_case("bias", lambda: product(3, 63, 128, 4, bias=True)),
    linear_case("bf16", lambda: product(2, 128, 128, 4, dtype=BF16), tol=4e-3),
    linear_case("bf16-one-token", lambda: product(1, 100, 128, 4, dtype=BF16), tol=4e-3),
    # widths of a multiple of four groups, for which Hopper has dedicated kernels
    *[
        linear_case(f"bf16-{width}-{tokens}", lambda t=tokens, w=width: product(t, 128, w, 4, dtype=BF16), tol=4e-3)
        for width, tokens in ((256, 1), (768, 1), (2560, 1), (7168, 1), (512, 5), (768, 16), (512, 33))
    ],
    # for Hopper, where formats and widths select kernels; on CPU each would compile another kernel
    *[
        linear_case(
            f"bf16-{f'{bits}bit-g{group}' if group else 'mxfp4'}-{tokens}x{rows}x{width}",
            lambda t=tokens, r=rows, w=width, b=bits, g=group: coded(t, r, w, b, g),
            tol=4e-3,
            slow=True,
        )
        for tokens, rows, width, bits, group in CODED
    ],
    linear_case("bf16-one-token-many-rows", lambda: product(1, 2304, 4096, 4, dtype=BF16), tol=4e-3, slow=True),
    linear_case("bf16-one-token-widest", lambda: product(1, 8192, 16384, 4, dtype=BF16), tol=4e-3, slow=True),
    linear_case("bf16-one-token-bias", lambda: product(1, 64, 256, 4, dtype=BF16, bias=True), tol=4e-3),
    linear_case("bf16-some-tokens-bias", lambda: product(5, 64, 320, 6, dtype=BF16, bias=True), tol=4e-3),
    # tiles of tokens on Hopper: each size of tile, width of code and group, ends of rows, of inputs and of tokens
    *[
        linear_case(
            f"bf16-{bits}bit-g{group}-{tokens}x{rows}x{width}",
            lambda t=tokens, r=rows, w=width, b=bits, g=group: product(t, r, w, b, dtype=BF16, group=g),
            tol=4e-3,
            slow=True,
        )
        for tokens, rows, width, bits, group in TILED + TILED_LARGE
    ],
    *[
        linear_case(f"bf16-{t}x{rows}x{width}", partial(product, t, rows, width, 4, BF16), tol=4e-3, slow=width > 1024)
        for t, rows, width in ((20, 200, 512), (64, 65, 1024), (50, 130, 4096), (17, 300, 8192))
    ],
    linear_case("bf16-tiles-bias", lambda: product(20, 130, 320, 4, dtype=BF16, bias=True), tol=4e-3),
    linear_case("many-tokens", lambda: product(150, 65, 128, 4, bias=True)),
    linear_case("bf16-many-tokens", lambda: product(150, 65, 128, 4, dtype=BF16), tol=4e-3),
    linear_case("f16", lambda: product(9, 65, 128, 4, dtype=F16), tol=1e-3),
    linear_case("nan-scale", lambda: broken(product(3, 64, 128, 4))),
    linear_case("nan-scale-fast", lambda: broken(product(3, 64, 128, 4)), exact=False, tol=FAST),
    linear_case("nan-input-fast", lambda: broken_input(product(3, 64, 128, 4)), exact=False, tol=FAST),
    linear_case(
        "fp8-nan-input-fast", lambda: broken_input(product(3, 64, 256, 8, group=128, kind="fp8")), exact=False, tol=FAST
    ),
    linear_case("fp8-zeros-fast", lambda: zeros(product(3, 64, 256, 8, group=128, kind="fp8")), exact=False, tol=FAST),
    linear_case("zeros-fast", lambda: zeros(product(3, 64, 128, 4)), exact=False, tol=FAST),
    linear_case("dense-bf16", lambda: dense(3, 100, 333, BF16)),
    linear_case("dense-bf16-many", lambda: dense(50, 100, 333, BF16)),
    linear_case("dense-f16", lambda: dense(2, 63, 100, F16)),
    linear_case("dense-f32", lambda: dense(7, 63, 100, F32)),
]
