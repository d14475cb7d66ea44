"""Inputs for products with weights: one weight, several, after a norm, gate and up, and embeddings."""

from functools import partial

import torch

from auraflux.ops._cases import Case
from auraflux.ops.linear._inputs import (
    BF16,
    F16,
    F32,
    bf16_pair,
    dense_pair,
    flops,
    from_stream,
    gated_stream,
    grid_lookup,
    in_bf16,
    in_bf16_of,
    lookup,
    pair,
    pair_in_bf16,
    several,
    several_in_bf16,
    stream_in_bf16,
    touched,
    weight,
    with_all_biases,
    with_biases,
)
from auraflux.ops.linear.cases.one_weight import BLOCKS, FAST, LINEAR_CASES, UNITS
from auraflux.ops.linear.reference import (
    add_norm_gate_up,
    add_norm_linears,
    add_norm_scores,
    embed,
    gate_up_swiglu,
    linears,
)
from auraflux.quant import grids

CASES = [
    *LINEAR_CASES,
    Case(add_norm_scores, "one-token-bf16", lambda: from_stream(1, 2048, [128], BF16), tol=4e-3),
    Case(add_norm_scores, "pair-bf16", lambda: from_stream(1, 333, [65, 1], BF16), tol=4e-3),
    Case(add_norm_scores, "one-token", lambda: from_stream(1, 100, [33, 1])),
    Case(add_norm_scores, "nothing-to-add", lambda: {**from_stream(1, 100, [33]), "delta": None}),
    Case(add_norm_scores, "many-tokens", lambda: from_stream(5, 128, [17])),
    Case(add_norm_scores, "three", lambda: from_stream(1, 64, [9, 3, 5])),
    Case(add_norm_scores, "biases", lambda: {**from_stream(1, 64, [9]), "biases": [torch.randn(9)]}),
    *(
        Case(add_norm_linears, f"bf16-{len(rows)}-{width}", partial(stream_in_bf16, 1, rows, width, len(rows) == 3), tol=4e-3)
        for rows, width in (
            ((128,), 256),
            ((512, 64), 2048),
            ((64, 16, 32), 768),
            ((64, 64, 64, 16), 4096),
            ((48,), 8448),
            ((96, 48), 7168),
            ((64, 16, 32), 8192),
        )
    ),
    # thread-block clusters that share the inputs, on Hopper: each cluster size and number of tokens, partial blocks of rows
    *(
        Case(
            add_norm_linears,
            f"bf16-{t}x{sum(rows)}x{width}",
            partial(stream_in_bf16, t, rows, width, t in (9, 32, 100)),
            tol=4e-3,
            slow=width > 1024,
        )
        for t, rows, width in (
            (2, (200,), 512),
            (9, (128, 33), 1024),
            (17, (40, 130, 21), 512),
            (64, (64, 16, 65, 130), 1024),
            (32, (512, 64, 64), 2048),
            (33, (130,), 4096),
            (20, (2200, 64), 4096),
            (40, (2300,), 4096),
            (20, (65,), 8192),
            # by tiles of tokens
            (20, (130, 64), 704),
            (70, (65,), 512),
            (100, (130,), 512),
        )
    ),
    *(
        Case(add_norm_scores, f"bf16-{t}x{width}", partial(from_stream, t, width, rows, BF16), tol=4e-3, slow=width > 2048)
        for t, width, rows in (
            (2, 2048, [128]),
            (17, 2048, [65, 1]),
            (64, 2048, [33]),
            (40, 4096, [16, 40]),
            (150, 2048, [40, 1]),
        )
    ),
    *(
        Case(add_norm_gate_up, f"bf16-{t}x{width}", partial(gated_stream, t, rows, width, BF16), tol=8e-3, slow=width > 1024)
        for t, rows, width in ((5, 72, 512), (33, 130, 1024), (20, 100, 4096), (20, 100, 704), (70, 130, 512))
    ),
    # more tokens than other tiled products: nine tiles, one more than run consecutively
    Case(add_norm_gate_up, "bf16-2200x320", lambda: gated_stream(2200, 200, 320, BF16), tol=8e-3, slow=True),
    Case(gate_up_swiglu, "bf16-1300x130x320", partial(pair_in_bf16, 1300, 130, 320), tol=1e-2, flops=flops, slow=True),
    Case(add_norm_linears, "many-tokens", lambda: {**from_stream(2, 128, [9]), "weights": [weight(63, 128, 4)]}),
    Case(add_norm_linears, "dense", lambda: from_stream(1, 128, [9, 5])),
    Case(add_norm_linears, "biases", lambda: {**from_stream(1, 128, [9]), "biases": [torch.randn(9)], "delta": None}),
    Case(add_norm_gate_up, "bf16", lambda: gated_stream(1, 64, 2048, BF16), tol=8e-3),
    Case(add_norm_gate_up, "nothing-to-add", lambda: {**gated_stream(1, 128, 768, BF16), "delta": None}, tol=8e-3),
    Case(add_norm_gate_up, "many-rows", lambda: gated_stream(1, 12288, 512, BF16), tol=8e-3),
    Case(add_norm_linears, "many-rows", partial(stream_in_bf16, 1, (12288, 64), 4096, False), tol=4e-3, slow=True),
    Case(add_norm_linears, "many-rows-narrow", partial(stream_in_bf16, 1, (24576, 128), 256, False), tol=4e-3),
    Case(add_norm_gate_up, "many-tokens", lambda: gated_stream(3, 33, 128)),
    Case(linears, "one-token", lambda: several(1, (2048, 512, 512), 1024, 4), exact=False, tol=FAST, flops=flops, bench=True),
    Case(linears, "one-token-exact", lambda: several(1, (128, 64, 33), 128, 4)),
    Case(linears, "many-tokens", lambda: with_biases(several(21, (100, 63, 64), 128, 4))),
    Case(linears, "mixed-bits", lambda: several(3, (63, 32, 32), 128, 4, last_bits=8)),
    Case(linears, "row-order", lambda: several(2, (100, 50, 3), 128, 4, lanes=1)),
    Case(linears, "dense", lambda: {"x": torch.randn(2, 63), "weights": [torch.randn(100, 63), torch.randn(5, 63)]}),
    *[
        Case(linears, f"bf16-{len(rows)}", partial(several_in_bf16, 1, rows, 768, 4), tol=4e-3)
        for rows in ((64, 16), (128, 32, 48), (96, 64, 16, 16))
    ],
    *[
        Case(linears, f"bf16-{tokens}-tokens-{bits}bit", partial(several_in_bf16, tokens, rows, 704, bits), tol=4e-3)
        for tokens, rows, bits in ((20, (200, 64), 4), (40, (128, 300, 65), 4), (70, (1, 64, 128, 40), 8))
    ],
    Case(linears, "bf16-many-rows", partial(several_in_bf16, 40, (9000, 8000, 65), 704, 4), tol=4e-3, slow=True),
    *[
        Case(linears, f"bf16-{bits}bit-{len(rows)}", partial(several_in_bf16, 1, rows, width, bits), tol=4e-3)
        for bits, rows, width in ((8, (64, 16), 576), (8, (96, 32, 32), 2048), (6, (48, 16, 16, 32), 320))
    ],
    *[
        Case(
            linears,
            f"bf16-{name}-{len(rows)}",
            partial(in_bf16_of, several, 1, rows, 384, bits, **options),
            tol=4e-3,
            slow=True,
        )
        for (name, bits, options), rows in zip(UNITS[:6:2], ((64, 16), (96, 32, 32), (48, 16, 16, 32)), strict=True)
    ],
    Case(
        linears, "bf16-q6k-odd", lambda: in_bf16(several(1, (33, 5, 7), 96, 6, group=16, kind="centred")), tol=4e-3, slow=True
    ),
    Case(linears, "bf16-biases", lambda: with_all_biases(several_in_bf16(1, (64, 32, 16), 512, 4)), tol=4e-3),
    Case(linears, "bf16-some-biases", lambda: with_biases(several_in_bf16(1, (64, 32, 16), 512, 8)), tol=4e-3),
    Case(linears, "dense-bf16-pair", lambda: in_bf16({"x": torch.randn(1, 333), "weights": bf16_pair(65, 1, 333)}), tol=4e-3),
    Case(gate_up_swiglu, "bf16-one-token", lambda: in_bf16(pair(1, 96, 768, 4)), tol=1e-2, flops=flops),
    Case(gate_up_swiglu, "bf16-tokens", partial(pair_in_bf16, 33, 200, 704), tol=1e-2, flops=flops),
    *[
        Case(
            gate_up_swiglu, f"bf16-{t}x{rows}x{width}", partial(pair_in_bf16, t, rows, width), tol=1e-2, flops=flops, slow=True
        )
        for t, rows, width in ((33, 200, 2112), (20, 10000, 128), (50, 9000, 320), (100, 9000, 320), (520, 4100, 256))
    ],
    Case(gate_up_swiglu, "bf16-tokens-8bit", partial(pair_in_bf16, 130, 100, 256, 8), tol=1e-2, flops=flops),
    *[
        Case(
            gate_up_swiglu,
            f"bf16-{bits}bit-one-token",
            partial(pair_in_bf16, 1, 96, width, bits),
            tol=1e-2,
            flops=flops,
        )
        for bits, width in ((8, 768), (2, 576))
    ],
    *[
        Case(
            gate_up_swiglu,
            f"bf16-{name}-one-token-{rows}x{width}",
            partial(in_bf16_of, pair, 1, rows, width, bits, **options),
            tol=1e-2,
            flops=flops,
            slow=True,
        )
        for name, bits, options in UNITS[::2]
        for rows, width in ((96, 384), (33, 96))
        if width % options.get("group", 64) == 0
    ],
    Case(gate_up_swiglu, "one-token", lambda: pair(1, 1536, 576, 4), exact=False, tol=2e-2, flops=flops, bench=True),
    Case(gate_up_swiglu, "one-odd-token", lambda: pair(1, 63, 192, 3), flops=flops),
    Case(gate_up_swiglu, "many-tokens", lambda: pair(21, 128, 192, 4), flops=flops),
    Case(gate_up_swiglu, "mixed-bits", lambda: pair(3, 63, 128, 4, up_bits=8), flops=flops),
    Case(gate_up_swiglu, "one-dense", lambda: {**pair(3, 63, 128, 4), "up": torch.randn(63, 128) / 12}),
    Case(gate_up_swiglu, "row-order", lambda: pair(2, 100, 128, 4, lanes=1), flops=flops),
    Case(gate_up_swiglu, "dense", lambda: dense_pair(3, 100, 63)),
    Case(embed, "one-token", lambda: lookup(1, 1000, 2048, 4), nbytes=touched, bench=True),
    Case(embed, "many-tokens", lambda: lookup(100, 333, 128, 6), nbytes=touched),
    Case(embed, "spilling-codes", lambda: lookup(7, 64, 192, 3), nbytes=touched),
    Case(embed, "spilling-codes-row-order", lambda: lookup(7, 64, 192, 5, lanes=1), nbytes=touched),
    Case(embed, "5bit", lambda: lookup(7, 64, 192, 5), nbytes=touched),
    Case(embed, "row-order", lambda: lookup(5, 63, 128, 8, lanes=1, scales=F32), nbytes=touched),
    Case(embed, "fp8", lambda: lookup(5, 63, 128, 8, kind="fp8"), nbytes=touched),
    *[Case(embed, name, partial(lookup, 5, 63, 96, bits, **options), nbytes=touched) for name, bits, options in BLOCKS],
    *[Case(embed, kind, partial(grid_lookup, 5, 63, 512, kind), nbytes=touched) for kind in grids.FORMATS],
    Case(embed, "mxfp4", lambda: lookup(5, 63, 128, 4, group=32, kind="mxfp4"), nbytes=touched),
    Case(embed, "f16-scales", lambda: lookup(5, 63, 128, 4, group=32, scales=F16), nbytes=touched),
    Case(embed, "dense", lambda: {"ids": torch.tensor([3, 0, 3]), "table": torch.randn(4, 63)}),
]
