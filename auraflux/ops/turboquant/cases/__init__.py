"""Inputs for the quantized cache: every pair of bits, widths with and without a Walsh-Hadamard transform, ragged batches,
windows whose old pages were freed, sinks, and vectors of zeros, of outliers and of extreme length."""

from functools import partial
from itertools import product

from auraflux.ops._cases import Case
from auraflux.ops.turboquant.arrangement import PAIR_BITS, PAIR_WIDTHS
from auraflux.ops.turboquant.cases.explicit_codebooks import EXPLICIT_CODEBOOK_CASES
from auraflux.ops.turboquant.cases.full_precision import FULL_PRECISION_CASES
from auraflux.ops.turboquant.cases.inputs import (
    BENCH,
    BF16,
    FAST,
    PAIRS,
    PROMPT,
    ROUNDED,
    SEED,
    WIDTHS,
    append,
    append_nbytes,
    appended_and_attended,
    attend,
    awkward,
    coded,
    decode_at,
    encoded,
    in_pairs,
    prefill_of,
    rope_appended,
    values,
    vectors,
)
from auraflux.ops.turboquant.cases.latent import LATENT_CASES
from auraflux.ops.turboquant.cases.token_selection import CHOICE_CASES
from auraflux.ops.turboquant.codebook import BITS
from auraflux.ops.turboquant.reference import (
    append_codes,
    decode,
    encode,
    rope_append_codes,
    rotate,
    turboquant_attention,
    turboquant_partials,
    turboquant_values,
)
from auraflux.ops.turboquant.reference_new_token import rope_append_attention

BYTES = list(product(PAIR_BITS, PAIR_BITS))  # bits whose values may be arranged in pairs
# bits of keys and values, width: some codes cross words
UNITS = ((3, 3, 128), (6, 4, 128), (4, 6, 64), (3, 6, 256), (8, 3, 128), (6, 6, 64), (2, 6, 128))

CASES = [
    Case(rotate, "one-token", lambda: {"x": vectors(1, 32, 128), "seed": SEED}, bench=True),
    Case(rotate, "many-tokens", lambda: {"x": vectors(256, 8, 128), "seed": SEED}, bench=True),
    Case(rotate, "inverse", lambda: {"x": vectors(3, 5, 256), "seed": SEED, "inverse": True}),
    Case(rotate, "matrix", lambda: {"x": vectors(7, 80), "seed": SEED}),
    Case(rotate, "matrix-inverse", lambda: {"x": vectors(7, 100), "seed": SEED, "inverse": True}),
    Case(rotate, "bf16", lambda: {"x": vectors(3, 64, dtype=BF16), "seed": SEED}, tol=4e-3),
    *(Case(encode, f"w{d}-b{b}", partial(encoded, 5, 3, d, bits=b)) for d in WIDTHS for b in BITS),
    *(Case(encode, f"awkward-w{d}", partial(awkward, d)) for d in (63, 64)),
    Case(encode, "bf16", lambda: encoded(9, 128, dtype=BF16)),
    Case(encode, "none", lambda: encoded(0, 64)),
    Case(encode, "one-token", lambda: encoded(1, 8, 128, bits=8), bench=True),
    Case(encode, "many-tokens", lambda: encoded(256, 8, 128), bench=True),
    *(Case(decode, f"w{d}-b{b}", partial(coded, 4, 3, bits=b, width=d, seed=SEED)) for d in (63, 96, 256) for b in BITS),
    Case(decode, "many-tokens", lambda: coded(8, 512, bits=4, width=128, seed=SEED), bench=True),
    *(Case(append_codes, f"k{k}v{v}", partial(append, [21, 40], [5, 1], 2, 64, bits=(k, v))) for k, v in PAIRS[::3]),
    *(Case(append_codes, f"w{d}", partial(append, [3, 33], [3, 2], 3, d, bits=(6, 3))) for d in WIDTHS[1:]),
    Case(append_codes, "no-tokens", lambda: append([0, 17, 9], [0, 2, 0], 2, 128)),
    Case(append_codes, "window", lambda: append([100, 40], [1, 1], 2, 64, freed=[6, 2])),
    *(
        Case(append_codes, f"pairs-k{k}v{v}", partial(in_pairs, append, [21, 9, 40, 32], [6, 9, 1, 2], 2, 64, bits=(k, v)))
        for k, v in BYTES
    ),
    *(
        Case(append_codes, f"pairs-few-v{v}", partial(in_pairs, append, [21, 9, 40], [1, 2, 3], 2, 64, bits=(8, v)))
        for v in PAIR_BITS
    ),
    *(
        Case(append_codes, f"pairs-k{k}v{v}w{d}", partial(in_pairs, append, [21, 9, 40], [6, 9, 1], 2, d, bits=(k, v)))
        for k, v, d in UNITS
    ),
    *(
        Case(
            append_codes,
            f"pairs-at-once-k{k}v{v}",
            partial(in_pairs, append, [1200], [1101], 8, 128, BF16, bits=(k, v), page=64),
            slow=True,
        )
        for k, v in ((8, 4), (4, 4), (4, 2), (8, 2), (8, 8), (4, 8))
    ),
    *(
        Case(
            append_codes,
            f"pairs-at-once-batch-k{k}v{v}",
            partial(in_pairs, append, [700, 40, 5, 333, 16], [500, 0, 5, 100, 16], 8, 128, BF16, bits=(k, v), page=64),
            slow=True,
        )
        for k, v in ((8, 4), (4, 4))
    ),
    Case(
        append_codes,
        "pairs-at-once-aligned",
        lambda: in_pairs(append, [400], [304], 8, 128, BF16, bits=(8, 4), page=64),
        slow=True,
    ),
    Case(append_codes, "pairs-many", lambda: in_pairs(append, [60, 50], [43, 20], 3, 128, bits=(8, 4), page=32)),
    Case(append_codes, "pairs-window", lambda: in_pairs(append, [100, 40, 7], [1, 0, 1], 2, 256, freed=[6, 2, 0])),
    Case(append_codes, "bf16", lambda: append([7], [7], 2, 128, dtype=BF16)),
    Case(
        append_codes, "one-token", lambda: append([1000], [1], 8, 128, bits=(8, 4), page=64), bench=True, nbytes=append_nbytes
    ),
    Case(
        append_codes,
        "many-tokens",
        lambda: append([256], [256], 8, 128, bits=(8, 4), page=64),
        bench=True,
        nbytes=append_nbytes,
    ),
    Case(rope_append_codes, "one-token", lambda: rope_appended([1000], [1], (32, 8), 128, bits=(8, 4), page=64), bench=True),
    *(
        Case(
            rope_append_codes,
            f"pairs-k{k}v{v}",
            partial(in_pairs, rope_appended, [21, 9, 40], [6, 9, 1], (4, 2), 64, bits=(k, v)),
        )
        for k, v in BYTES[::2]
    ),
    *(
        Case(
            rope_append_codes, f"pairs-k{k}v{v}w{d}", partial(in_pairs, rope_appended, [21, 40], [6, 1], (4, 2), d, bits=(k, v))
        )
        for k, v, d in UNITS[1::4]
    ),
    *(
        Case(rope_append_attention, name, partial(appended_and_attended, length, heads, width, bits, **options), **FAST)
        for name, length, heads, width, bits, options in (
            ("one-token", 700, (8, 2), 128, (8, 4), {}),
            ("w64", 300, (8, 2), 64, (4, 4), {"softcap": 30.0, "sinks": True}),
            ("calibrated", 333, (6, 2), 128, (4, 2), {"calibrated": True, "window": 200, "strided": True, "rotated": 64}),
            ("full-precision", 1100, (32, 4), 128, (8, 4), {"full_precision": (1, 32), "calibrated": True}),
            ("interleaved", 257, (16, 2), 128, (2, 8), {"full_precision": (4, 32), "interleaved": True, "mscale": 1.2}),
            ("plain", 4000, (9, 3), 128, (8, 8), {"normed": False}),
            ("w256", 500, (16, 2), 256, (8, 4), {"rotated": 64, "strided": True}),
            ("bf16", 1025, (32, 8), 128, (8, 4), {"dtype": BF16}),
        )
    ),
    Case(rope_append_codes, "rows", lambda: rope_appended([21, 40], [5, 1], (6, 3), 128, bits=(6, 3), normed=False)),
    Case(
        rope_append_codes,
        "partial",
        lambda: in_pairs(rope_appended, [300, 7], [1, 1], (8, 2), 256, 64, strided=True, bits=(8, 4)),
    ),
    Case(rope_append_codes, "interleaved", lambda: rope_appended([70], [2], (4, 1), 64, interleaved=True, mscale=1.3)),
    Case(rope_append_codes, "window", lambda: rope_appended([100, 40], [1, 1], (4, 2), 64, freed=[6, 2])),
    Case(rope_append_codes, "matrix", lambda: rope_appended([33], [2], (4, 2), 80)),
    Case(rope_append_codes, "many-tokens", lambda: rope_appended([80], [80], (4, 2), 64, strided=True)),
    Case(rope_append_codes, "hundreds", lambda: rope_appended([160, 9], [137, 3], (4, 2), 64, strided=True), slow=True),
    Case(
        rope_append_codes,
        "many-full-precision",
        lambda: in_pairs(rope_appended, [121, 40], [90, 3], (4, 2), 128, calibrated=True, full_precision=(1, 32)),
        slow=True,
    ),
    Case(rope_append_codes, "no-tokens", lambda: rope_appended([0, 17], [0, 0], (4, 2), 64)),
    Case(
        rope_append_codes,
        "bf16",
        lambda: in_pairs(rope_appended, [33, 7], [1, 1], (8, 2), 128, dtype=BF16, bits=(8, 4)),
        tol=4e-3,
    ),
    *(Case(turboquant_values, f"b{b}", partial(values, 6, 2, 333, b, 96)) for b in BITS),
    *(Case(turboquant_values, f"w{d}", partial(values, 8, 2, 63, 3, d)) for d in WIDTHS),
    Case(turboquant_values, "sparse", lambda: {**values(8, 4, 100, 4, 64), "threshold": 0.01}),
    Case(turboquant_values, "bf16", lambda: values(4, 4, 100, 4, 64, dtype=BF16), tol=4e-3),
    Case(turboquant_values, "long", lambda: values(32, 8, 4096, 4, 128), bench=True),
    Case(turboquant_partials, "decode", lambda: attend([63, 100], [1, 1], (8, 2), 64, block=32)),
    Case(turboquant_partials, "prefill", lambda: attend([40], [17], (4, 2), 80, bits=(6, 3), block=16, softcap=20.0)),
    Case(turboquant_partials, "window-sinks", lambda: attend([90, 5], [3, 5], (4, 1), 64, block=24, window=20, sinks=True)),
    Case(turboquant_partials, "no-tokens", lambda: attend([0, 20], [0, 1], (2, 2), 64, block=16, sinks=True)),
    Case(turboquant_partials, "nothing-visible", lambda: attend([20], [2], (2, 2), 64, block=16, window=0)),
    Case(turboquant_partials, "pairs", lambda: in_pairs(attend, [63, 100], [2, 1], (8, 2), 64, block=21, sinks=True)),
    Case(turboquant_partials, "long", lambda: attend([4096], [1], (32, 8), 128, page=64, block=512), **BENCH),
    *(Case(turboquant_attention, f"k{k}v{v}", partial(attend, [37], [1], (4, 2), 64, bits=(k, v))) for k, v in PAIRS),
    *(Case(turboquant_attention, f"w{d}", partial(attend, [50, 17], [1, 4], (6, 2), d, bits=(3, 6))) for d in WIDTHS),
    Case(turboquant_attention, "prefill", lambda: attend([33, 100, 63], [33, 7, 1], (8, 2), 128, bits=(8, 4))),
    Case(turboquant_attention, "window", lambda: attend([100, 40, 10], [1, 3, 10], (4, 2), 64, window=24, freed=[4, 0, 0])),
    Case(turboquant_attention, "window-sinks", lambda: attend([70, 3], [2, 1], (4, 2), 64, window=33, sinks=True)),
    Case(turboquant_attention, "sinks", lambda: attend([18, 100], [1, 1], (16, 2), 64, bits=(4, 2), sinks=True)),
    Case(turboquant_attention, "softcap", lambda: attend([65], [5], (4, 4), 256, softcap=3.0)),
    Case(turboquant_attention, "no-tokens", lambda: attend([0, 9, 5], [0, 1, 0], (4, 2), 64)),
    Case(turboquant_attention, "nothing-new", lambda: attend([9, 5], [0, 0], (4, 2), 64)),
    Case(turboquant_attention, "nothing-visible", lambda: attend([9, 5], [2, 1], (4, 2), 64, window=0)),
    Case(turboquant_attention, "one-position", lambda: attend([1], [1], (8, 8), 128)),
    Case(turboquant_attention, "bf16", lambda: attend([50], [3], (8, 2), 128, dtype=BF16, sinks=True), tol=4e-3),
    Case(turboquant_attention, "sparse", lambda: attend([400, 90], [1, 2], (8, 2), 64, threshold=1e-3), tol=2e-2),
    Case(turboquant_attention, "sparse-prefill", lambda: attend([100], [40], (8, 2), 64, threshold=1e-5), tol=1e-3),
    Case(turboquant_attention, "sparse-sinks", lambda: attend([300], [1], (8, 2), 80, sinks=True, threshold=1e-6), tol=1e-4),
    Case(turboquant_attention, "batch", lambda: attend([500, 1000, 250, 333], [1] * 4, (16, 2), 256, bits=(8, 4)), **BENCH),
    *(Case(turboquant_attention, f"decode-8k-k{k}v{v}", partial(decode_at, 8, k, v), **BENCH) for k, v in ((8, 4), (4, 4))),
    *(
        Case(turboquant_attention, f"fast-decode-{n}k-k{k}v{v}", partial(decode_at, n, k, v), **FAST, **BENCH, slow=n > 8)
        for n in (1, 8, 32)
        for k, v in ((8, 4), (4, 4), (4, 2))
    ),
    *(
        Case(turboquant_attention, f"fast-prefill-512-of-{n}-k{k}v4", partial(prefill_of, n, k), **FAST, **BENCH, slow=n > 512)
        for n in (512, 2048)
        for k in (8, 4)
    ),
    *(Case(turboquant_attention, f"fast-k{k}v{v}", partial(attend, [150], [1], (4, 2), 64, (k, v)), **FAST) for k, v in PAIRS),
    *(
        Case(turboquant_attention, f"fast-k{k}w{d}", partial(attend, [333], [1], (8, 2), d, (k, 4), 64), **FAST)
        for k in (4, 8)
        for d in WIDTHS
    ),
    *(
        Case(turboquant_attention, f"fast-group{n}", partial(attend, [100, 17], [1, 1], (n, 1), 64), **FAST)
        for n in (1, 3, 7, 66)
    ),
    *(
        Case(turboquant_attention, f"fast-{n}", partial(attend, [n], [1], (4, 1), 64, (8, 4)), **FAST)
        for n in (1, 63, 127, 128, 129, 257)
    ),
    *(
        Case(turboquant_attention, f"fast-k{k}v{v}w{d}", partial(attend, [129], [1], (3, 1), d, (k, v), 7), **FAST)
        for d, (k, v) in ((32, (3, 2)), (96, (2, 6)), (256, (6, 3)), (512, (6, 8)))
    ),
    Case(turboquant_attention, "fast-few-tokens", lambda: attend([150, 90], [3, 1], (4, 2), 64), **FAST),
    Case(
        turboquant_attention,
        "fast-sparse",
        lambda: attend([700], [1], (8, 2), 128, (8, 4), threshold=1e-4),
        exact=False,
        tol=2e-2,
    ),
    Case(
        turboquant_attention,
        "fast-window-sinks",
        lambda: attend([300, 40, 9], [1, 1, 3], (4, 2), 64, window=150, freed=[9, 0, 0], sinks=True),
        **FAST,
    ),
    Case(turboquant_attention, "fast-softcap", lambda: attend([150], [1], (4, 4), 256, bits=(8, 4), softcap=3.0), **FAST),
    Case(turboquant_attention, "fast-nothing-visible", lambda: attend([9, 5], [1, 1], (4, 2), 64, window=0), **FAST),
    Case(turboquant_attention, "fast-odd-pages", lambda: attend([333], [1], (8, 2), 128, (8, 4), page=7), **FAST),
    Case(turboquant_attention, "fast-bf16", lambda: attend([200], [1], (8, 2), 128, (8, 4), dtype=BF16), **FAST),
    Case(turboquant_partials, "fast", lambda: attend([300, 100], [1, 1], (8, 2), 64, block=32, sinks=True), **FAST),
    Case(turboquant_partials, "sparse", lambda: attend([300], [1], (8, 2), 64, block=100, threshold=1e-3), tol=2e-2),
    *(
        Case(
            turboquant_attention, f"pairs-k{k}v{v}w{d}", partial(in_pairs, attend, [333, 7], [1, 1], (4, 2), d, (k, v)), **FAST
        )
        for k, v in BYTES
        for d in PAIR_WIDTHS
    ),
    *(
        Case(
            turboquant_attention, f"pairs-k{k}v{v}w{d}", partial(in_pairs, attend, [333, 7], [1, 1], (4, 2), d, (k, v)), **FAST
        )
        for k, v, d in UNITS
    ),
    *(
        Case(
            turboquant_attention,
            f"pairs-long-k{k}v{v}w{d}",
            partial(in_pairs, attend, [7000, 500], [4, 2], (48, 24), d, (k, v), page=64, window=window),
            **FAST,
            slow=True,
        )
        for k, v, d, window in ((4, 4, 128, None), (4, 2, 64, 5000), (3, 3, 128, None), (2, 2, 256, None))
    ),
    *(
        Case(
            turboquant_attention,
            f"pairs-one-text-k{k}v{v}w{d}",
            partial(in_pairs, attend, [700], [1], (16, 2), d, (k, v), page=64, sinks=d == 64),
            **FAST,
        )
        for k, v, d in ((4, 4, 64), (2, 2, 64), (4, 4, 128), (8, 8, 128), (4, 2, 128), (4, 4, 256), (4, 8, 256))
    ),
    *(
        Case(
            turboquant_attention,
            f"pairs-one-long-{len(more)}-short-k{k}v{v}w{d}",
            partial(in_pairs, attend, [9000, *more], [1] * (1 + len(more)), (8, 2), d, (k, v), page=64, sinks=d == 64),
            **FAST,
            slow=True,
        )
        for more, k, v, d in (
            ([], 4, 4, 64),
            ([40, 700], 4, 4, 64),
            ([1 + 37 * i % 301 for i in range(31)], 8, 4, 128),
            ([40, 700], 4, 4, 256),
        )
    ),
    *(
        Case(turboquant_attention, f"pairs-group{n}", partial(in_pairs, attend, [170, 17], [1, 1], (2 * n, 2), 128), **FAST)
        for n in (1, 3, 7, 8, 9, 12, 16, 66)
    ),
    *(
        Case(turboquant_attention, f"pairs-{n}", partial(in_pairs, attend, [n], [1], (8, 2), 64, (8, 4)), **FAST)
        for n in (1, 15, 16, 17, 127, 128, 129, 1000)
    ),
    *(
        Case(
            turboquant_attention,
            f"pairs-batch-{heads[1]}-heads-k{k}v{v}w{d}",
            partial(in_pairs, attend, [1 + 37 * i % 301 for i in range(32)], [1] * 32, heads, d, (k, v), page=64, sinks=k == 4),
            **FAST,
            slow=True,
        )
        for heads, d, k, v in (
            ((32, 4), 128, 8, 4),
            ((32, 4), 128, 4, 2),
            ((16, 8), 128, 8, 4),
            ((32, 4), 64, 4, 4),
            ((8, 4), 256, 8, 4),
        )
    ),
    Case(turboquant_attention, "pairs-exact", lambda: in_pairs(attend, [70, 33], [1, 5], (4, 2), 64, (8, 4))),
    Case(turboquant_attention, "pairs-prefill", lambda: in_pairs(attend, [90, 63], [40, 33], (4, 2), 128, page=32)),
    Case(
        turboquant_attention, "pairs-prefill-k6v3", lambda: in_pairs(attend, [90, 63], [40, 33], (4, 2), 128, (6, 3), page=32)
    ),
    Case(
        turboquant_attention,
        "pairs-prompt-k3v6",
        lambda: in_pairs(attend, [200], [130], (2, 1), 128, (3, 6), page=32),
        slow=True,
    ),
    *(
        Case(turboquant_attention, f"prompt-w{d}", partial(attend, [200, 150], [140, 150], (4, 2), d, **PROMPT), **ROUNDED)
        for d in (64, 80, 128, 256, 512)
    ),
    *(
        Case(
            turboquant_attention,
            f"pairs-prompt-k{k}v{v}",
            partial(in_pairs, attend, [200], [130], (4, 2), 128, (k, v), **PROMPT),
            **ROUNDED,
        )
        for k, v in ((8, 4), (4, 4), (6, 3))
    ),
    Case(turboquant_attention, "pairs-few", lambda: in_pairs(attend, [150, 90, 9], [3, 0, 2], (4, 2), 64, window=70), **FAST),
    Case(
        turboquant_attention,
        "pairs-window-sinks",
        lambda: in_pairs(attend, [300, 40, 9], [1, 1, 3], (4, 2), 64, window=150, freed=[9, 0, 0], sinks=True),
        **FAST,
    ),
    Case(turboquant_attention, "pairs-softcap", lambda: in_pairs(attend, [150], [1], (4, 4), 256, (8, 4), softcap=3.0), **FAST),
    Case(turboquant_attention, "pairs-nothing-visible", lambda: in_pairs(attend, [9, 5], [1, 1], (4, 2), 64, window=0), **FAST),
    Case(turboquant_attention, "pairs-bf16", lambda: in_pairs(attend, [500], [1], (8, 2), 128, (8, 4), dtype=BF16), tol=4e-3),
    *FULL_PRECISION_CASES,
    Case(turboquant_attention, "many-tokens", lambda: attend([512], [128], (16, 4), 128, bits=(8, 4), page=64), **BENCH),
    *LATENT_CASES,
    *EXPLICIT_CODEBOOK_CASES,
    *CHOICE_CASES,
]
