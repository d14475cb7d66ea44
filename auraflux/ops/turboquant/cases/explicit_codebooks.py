"""Inputs with explicit codebooks in place of the default ones."""

from functools import partial
from itertools import product

from auraflux.ops._cases import Case
from auraflux.ops.turboquant.cases.full_precision import FULL_PRECISION
from auraflux.ops.turboquant.cases.inputs import (
    FAST,
    PAIRS,
    PROMPT,
    ROUNDED,
    SEED,
    append,
    attend,
    awkward,
    coded,
    encoded,
    in_pairs,
    rope_appended,
    values,
    with_codebooks,
    with_shared_codebook,
    with_zero,
)
from auraflux.ops.turboquant.codebook import BITS
from auraflux.ops.turboquant.reference import (
    append_codes,
    decode,
    encode,
    rope_append_codes,
    turboquant_attention,
    turboquant_partials,
    turboquant_values,
)

EXPLICIT_CODEBOOK_CASES = [
    *(
        Case(encode, f"given-w{d}-b{b}", partial(with_codebooks, encoded, 5, 3, d, bits=b))
        for d in (63, 64, 100, 256)
        for b in BITS
    ),
    *(Case(encode, f"given-zero-w{d}", partial(awkward, d, with_zero)) for d in (63, 64)),
    Case(encode, "given-many", lambda: with_codebooks(encoded, 300, 8, 128, bits=4)),
    *(
        Case(decode, f"given-w{d}-b{b}", partial(with_codebooks, coded, 4, 3, bits=b, width=d, seed=SEED))
        for d, b in product((63, 128), BITS)
    ),
    *(Case(turboquant_values, f"given-b{b}", partial(with_codebooks, values, 6, 2, 333, b, 96)) for b in BITS),
    *(
        Case(append_codes, f"given-k{k}v{v}", partial(with_codebooks, append, [21, 40], [5, 1], 2, 64, bits=(k, v), **options))
        for k, v, options in ((8, 4, {}), (4, 3, FULL_PRECISION["full-precision"]), (6, 2, {}))
    ),
    *(
        Case(
            append_codes,
            f"given-pairs-k{k}v{v}",
            partial(with_codebooks, in_pairs, append, [21, 40], [5, 1], 2, 64, bits=(k, v)),
        )
        for k, v in ((8, 4), (3, 2))
    ),
    *(
        Case(
            rope_append_codes,
            f"given-{name}",
            partial(with_codebooks, rope_appended, [121, 40], [1, 1], (4, 2), 128, **options),
        )
        for name, options in (("bare", {}), ("full-precision", FULL_PRECISION["full-precision"]))
    ),
    *(
        Case(
            turboquant_attention, f"given-k{k}v{v}", partial(with_codebooks, attend, [37, 150], [1, 3], (4, 2), 64, bits=(k, v))
        )
        for k, v in PAIRS[::3]
    ),
    *(
        Case(
            turboquant_attention, f"given-{kind}", partial(with_codebooks, attend, [150, 70], [new, 1], (4, 2), 128, **options)
        )
        for kind, new, options in (
            ("full-precision", 1, FULL_PRECISION["full-precision"]),
            ("full-precision-prefill", 90, FULL_PRECISION["full-precision"]),
            ("window", 3, {"window": 48, "sinks": True}),
        )
    ),
    *(
        Case(
            turboquant_attention,
            f"given-pairs-k{k}v{v}",
            partial(with_codebooks, in_pairs, attend, [333], [1], (4, 2), d, (k, v)),
            **FAST,
        )
        for k, v, d in ((4, 4, 128), (8, 4, 64), (3, 3, 128), (2, 2, 256))
    ),
    Case(
        turboquant_attention,
        "given-one-pairs",
        lambda: with_shared_codebook(in_pairs, attend, [333], [1], (4, 2), 128, (4, 4)),
        **FAST,
    ),
    Case(turboquant_attention, "given-fast", lambda: with_codebooks(attend, [333, 40], [1, 1], (8, 2), 128, (8, 4)), **FAST),
    Case(
        turboquant_attention,
        "given-pairs-prompt",
        lambda: with_codebooks(in_pairs, attend, [200], [140], (4, 2), 128, **PROMPT),
        **ROUNDED,
    ),
    Case(turboquant_partials, "given", lambda: with_codebooks(attend, [63, 100], [1, 1], (8, 2), 64, block=32)),
]
