"""Inputs for quantized latents of MLA: rows that are key and value at once, with RoPE keys and with full-precision rows."""

from functools import partial
from typing import Any

import torch

from auraflux.ops._cases import Case
from auraflux.ops.turboquant.cases.inputs import BF16, with_codebooks
from auraflux.ops.turboquant.cases.latent_inputs import (
    append_latent,
    append_latent_nbytes,
    attend_latent,
    attend_latent_flops,
    attend_latent_nbytes,
    narrow_latent,
    rope_appended_latent,
    with_sinks,
)
from auraflux.ops.turboquant.codebook import BITS
from auraflux.ops.turboquant.reference import (
    append_latent_codes,
    rope_append_latent_codes,
    turboquant_latent_attention,
    turboquant_latent_partials,
)

LATENT_BENCH: dict[str, Any] = {"bench": True, "nbytes": attend_latent_nbytes, "flops": attend_latent_flops}

LATENT_CASES = [
    *(Case(append_latent_codes, f"b{b}", partial(append_latent, [21, 40], [5, 1], 64, 8, bits=b)) for b in BITS),
    *(Case(append_latent_codes, f"w{d}", partial(append_latent, [3, 33], [3, 2], d, 16, bits=6)) for d in (100, 128, 512)),
    Case(append_latent_codes, "narrower", lambda: append_latent([9, 0, 20], [2, 0, 3], 256, 64, dtype=BF16)),
    Case(append_latent_codes, "bf16-cache", lambda: append_latent([17], [2], 128, 7, page=7, cache=BF16)),
    Case(
        append_latent_codes,
        "one-token",
        lambda: append_latent([700], [1], 512, 64, bits=8, page=64),
        bench=True,
        nbytes=append_latent_nbytes,
    ),
    *(
        Case(rope_append_latent_codes, f"b{b}", partial(rope_appended_latent, [21, 40], [5, 1], 3, (20, 16, 64), bits=b))
        for b in (3, 4, 8)
    ),
    Case(
        rope_append_latent_codes,
        "w100",
        lambda: rope_appended_latent([9, 0, 20], [2, 0, 3], 3, (20, 16, 100), interleaved=False, cache=BF16),
    ),
    Case(
        rope_append_latent_codes,
        "one-token",
        lambda: rope_appended_latent([700], [1], 128, (128, 64, 512), dtype=BF16, bits=8, page=64, cache=BF16),
        tol=4e-3,
        bench=True,
    ),
    *(Case(turboquant_latent_attention, f"b{b}", partial(attend_latent, [37, 100], [1, 3], 5, 64, 8, bits=b)) for b in BITS),
    *(
        Case(turboquant_latent_attention, f"w{d}", partial(attend_latent, [50, 17], [1, 4], 16, d, 16, bits=8))
        for d in (63, 100, 128, 256, 512)
    ),
    *(
        Case(turboquant_latent_attention, f"{n}-positions", partial(attend_latent, [n], [1], 16, 128, 64, page=64))
        for n in (1, 63, 64, 65, 95, 96, 97, 333)
    ),
    Case(turboquant_latent_partials, "b4", lambda: attend_latent([37, 100], [1, 3], 5, 64, 8, bits=4), bench=True),
    Case(turboquant_latent_partials, "ragged", lambda: attend_latent([20, 1, 0, 9, 200], [3, 1, 0, 0, 99], 3, 64, 1, page=7)),
    Case(turboquant_latent_attention, "ragged", lambda: attend_latent([20, 1, 0, 9, 200], [3, 1, 0, 0, 99], 3, 64, 1, page=7)),
    Case(
        turboquant_latent_attention,
        "sinks",
        lambda: with_sinks(attend_latent([20, 1, 0, 9, 200], [3, 1, 0, 0, 99], 3, 64, 1, page=7)),
    ),
    Case(turboquant_latent_attention, "16-bits-sinks", lambda: with_sinks(narrow_latent(16, 8, [333], [1])), tol=4e-3),
    Case(turboquant_latent_attention, "bf16", lambda: attend_latent([50], [3], 8, 128, 16, dtype=BF16), tol=4e-3),
    Case(turboquant_latent_attention, "bf16-cache", lambda: attend_latent([50], [3], 8, 128, 16, cache=BF16)),
    Case(
        turboquant_latent_attention,
        "decode",
        lambda: attend_latent([2048], [1], 16, 512, 64, bits=8, page=64),
        **LATENT_BENCH,
    ),
    Case(
        turboquant_latent_attention,
        "decode-128-heads",
        lambda: attend_latent([1024], [1], 128, 512, 64, bits=4, page=64),
        **LATENT_BENCH,
    ),
    *(
        Case(turboquant_latent_attention, f"16-bits-{heads}-heads-b{bits}", partial(narrow_latent, heads, bits), tol=4e-3)
        for heads in (5, 16, 32, 40, 64)
        for bits in (4, 8)
    ),
    *(
        Case(
            turboquant_latent_attention,
            f"16-bits-long-{heads}-heads-b{bits}",
            partial(narrow_latent, heads, bits, [9000, 700], [1, 2], 128),
            tol=4e-3,
            slow=True,
        )
        for heads in (16, 32, 128)
        for bits in (4, 8)
    ),
    *(
        Case(turboquant_latent_attention, f"16-bits-{n}-positions", partial(narrow_latent, 16, 8, [n], [1]), tol=4e-3)
        for n in (1, 63, 64, 65, 257)
    ),
    *(
        Case(
            append_latent_codes,
            f"full-precision-b{b}",
            partial(append_latent, [121, 40, 3], [35, 1, 3], 64, 8, bits=b, full_precision=(1, 32)),
        )
        for b in BITS[::2]
    ),
    *(
        Case(
            append_latent_codes,
            f"full-precision-w{d}-{kind}",
            partial(append_latent, [121, 3], [35, 3], d, 16, bits=6, cache=dtype, full_precision=full_precision),
        )
        for d, kind, dtype, full_precision in (
            (100, "bf16", BF16, (2, 20)),
            (512, "bf16", BF16, (1, 32)),
            (128, "f16", torch.float16, (1, 0)),
            (256, "f32", torch.float32, (0, 32)),
        )
    ),
    *(
        Case(
            rope_append_latent_codes,
            f"full-precision-w{width}-{new}",
            partial(rope_appended_latent, [121, 40], [new, 1], 3, (20, 16, width), bits=4, cache=BF16, full_precision=(1, 32)),
            # one unit in the last place of float32 may round a full-precision value to its neighbour in bfloat16
            tol=1e-4,
        )
        for width, new in ((64, 1), (100, 5), (512, 1), (512, 20))
    ),
    Case(
        rope_append_latent_codes,
        "full-precision-one-token",
        lambda: rope_appended_latent(
            [700], [1], 128, (128, 64, 512), dtype=BF16, bits=8, page=64, cache=BF16, full_precision=(1, 32)
        ),
        tol=4e-3,
        bench=True,
    ),
    *(
        Case(
            turboquant_latent_attention,
            f"full-precision-b{b}",
            partial(attend_latent, [137, 30], [1, 3], 5, 64, 8, bits=b, full_precision=(1, 32)),
        )
        for b in BITS
    ),
    *(
        Case(
            turboquant_latent_attention,
            f"full-precision-w{d}-{kind}-{new}",
            partial(attend_latent, [150, 70], [new, 1], 16, d, 16, bits=8, cache=dtype, full_precision=(3, 40)),
        )
        for d, kind, dtype in (
            (63, "f32", torch.float32),
            (100, "bf16", BF16),
            (512, "bf16", BF16),
            (128, "f16", torch.float16),
        )
        for new in (1, 5, 90)
    ),
    *(
        Case(
            turboquant_latent_attention,
            f"full-precision-{n}-positions",
            partial(attend_latent, [n], [1], 16, 128, 64, page=64, full_precision=(1, 32)),
        )
        for n in (1, 2, 31, 32, 33, 34, 65, 333)
    ),
    Case(
        turboquant_latent_attention,
        "full-precision-head",
        lambda: attend_latent([150, 2], [1, 1], 4, 64, 8, full_precision=(1, 0)),
    ),
    Case(
        turboquant_latent_attention,
        "full-precision-recent",
        lambda: attend_latent([150, 20], [3, 20], 4, 64, 8, full_precision=(0, 32)),
    ),
    Case(
        turboquant_latent_attention,
        "full-precision-ragged",
        lambda: attend_latent([20, 1, 0, 9, 200], [3, 1, 0, 0, 99], 3, 64, 1, page=7, full_precision=(2, 11)),
    ),
    Case(
        turboquant_latent_attention,
        "full-precision-decode",
        lambda: attend_latent([2048], [1], 16, 512, 64, bits=8, page=64, full_precision=(1, 32)),
        **LATENT_BENCH,
    ),
    *(
        Case(
            turboquant_latent_attention,
            f"16-bits-full-precision-{heads}-heads-b{bits}",
            partial(narrow_latent, heads, bits, full_precision=(1, 32)),
            tol=4e-3,
        )
        for heads in (5, 16, 32, 40, 64)
        for bits in (4, 8)
    ),
    *(
        Case(
            turboquant_latent_attention,
            f"16-bits-full-precision-long-{heads}-heads-b{bits}",
            partial(narrow_latent, heads, bits, [9000, 700], [1, 2], 128, (1, 32)),
            tol=4e-3,
            slow=True,
        )
        for heads in (16, 128)
        for bits in (4, 8)
    ),
    *(
        Case(
            turboquant_latent_attention,
            f"16-bits-full-precision-{n}-positions",
            partial(narrow_latent, 16, 8, [n], [1], full_precision=(1, 32)),
            tol=4e-3,
        )
        for n in (1, 33, 34, 65, 97, 257)
    ),
    *(
        Case(append_latent_codes, f"given-b{b}", partial(with_codebooks, append_latent, [21, 40], [5, 1], 64, 8, bits=b))
        for b in (3, 8)
    ),
    Case(
        rope_append_latent_codes,
        "given",
        lambda: with_codebooks(rope_appended_latent, [21, 40], [5, 1], 3, (20, 16, 64), bits=4),
    ),
    *(
        Case(
            turboquant_latent_attention,
            f"given-b{b}",
            partial(with_codebooks, attend_latent, [137, 30], [1, 3], 5, 64, 8, bits=b, **options),
        )
        for b, options in ((3, {}), (8, {"full_precision": (1, 32)}))
    ),
    *(
        Case(turboquant_latent_attention, f"16-bits-given-b{b}", partial(with_codebooks, narrow_latent, 16, b), tol=4e-3)
        for b in (4, 8)
    ),
]
