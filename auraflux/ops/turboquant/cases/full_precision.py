"""Inputs for caches with sink tokens and a recent window in full precision, and with key calibration."""

from functools import partial
from itertools import product
from typing import Any

import torch

from auraflux.ops._cases import Case
from auraflux.ops.turboquant.cases.inputs import (
    BENCH,
    BF16,
    FAST,
    PAIRS,
    PROMPT,
    ROUNDED,
    append,
    attend,
    decode_at,
    in_pairs,
    prefill_of,
    rope_appended,
)
from auraflux.ops.turboquant.reference import (
    append_codes,
    rope_append_codes,
    turboquant_attention,
    turboquant_partials,
)

MANY = [150, 37, 1, 64, 97, 33, 20, 200]  # lengths of sequences
# key calibration and full-precision rows: as models are served, and each alone
FULL_PRECISION: dict[str, dict[str, Any]] = {
    "full-precision": {"calibrated": True, "full_precision": (1, 32)},
    "calibrated": {"calibrated": True},
    "uncalibrated": {"full_precision": (2, 20)},
}
FULL_PRECISION_SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fast": ({"lengths": [333, 40, 5], "counts": [1, 1, 1], "heads": (8, 2), "width": 128, "bits": (4, 4)}, FAST),
    "fast-w256": ({"lengths": [333], "counts": [1], "heads": (4, 1), "width": 256, "bits": (8, 4), "page": 64}, FAST),
    "few": ({"lengths": [150, 33], "counts": [3, 2], "heads": (4, 2), "width": 64}, {}),
    "prefill": ({"lengths": [33, 200, 63], "counts": [33, 170, 1], "heads": (8, 2), "width": 128}, {}),
    "window": ({"lengths": [200, 60, 10], "counts": [1, 40, 10], "heads": (4, 2), "width": 64, "window": 48}, {}),
    "window-sinks": ({"lengths": [70, 3], "counts": [2, 1], "heads": (4, 2), "width": 64, "window": 41, "sinks": True}, {}),
    "softcap": ({"lengths": [165], "counts": [5], "heads": (4, 4), "width": 256, "softcap": 3.0}, {}),
    "matrix": ({"lengths": [100, 40], "counts": [1, 4], "heads": (4, 2), "width": 80}, {}),
    "sparse": ({"lengths": [400], "counts": [1], "heads": (4, 2), "width": 64, "threshold": 1e-4}, {"tol": 2e-2}),
}

# for the GPU kernel of few tokens: several splits, sequences shorter than the window, more heads than a tile, freed pages
FULL_PRECISION_PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "k4v4": ({"lengths": [700, 5, 33], "counts": [1, 1, 1], "heads": (8, 2), "width": 128, "bits": (4, 4)}, FAST),
    "k8v4": ({"lengths": [1500], "counts": [1], "heads": (12, 1), "width": 64, "bits": (8, 4)}, FAST),
    "k3v3": ({"lengths": [333, 64], "counts": [1, 1], "heads": (4, 2), "width": 128, "bits": (3, 3)}, FAST),
    "w256": ({"lengths": [333], "counts": [1], "heads": (4, 1), "width": 256, "bits": (4, 4)}, FAST),
    "few": ({"lengths": [150, 33], "counts": [3, 2], "heads": (4, 2), "width": 64, "bits": (4, 4)}, FAST),
    "window-sinks": (
        {"lengths": [300, 60], "counts": [1, 1], "heads": (4, 2), "width": 64, "window": 128, "sinks": True, "freed": [9, 0]},
        FAST,
    ),
    "softcap": ({"lengths": [165], "counts": [1], "heads": (4, 4), "width": 128, "softcap": 3.0}, FAST),
    "prompt": ({"lengths": [200, 150], "counts": [140, 150], "heads": (4, 2), "width": 128, **PROMPT}, ROUNDED),
}

FULL_PRECISION_CASES = [
    *(
        Case(append_codes, f"{name}-k{k}v{v}", partial(append, [121, 40, 3], [35, 1, 3], 2, 64, bits=(k, v), **options))
        for (name, options), (k, v) in product(FULL_PRECISION.items(), ((8, 4), (4, 4), (3, 2)))
    ),
    *(
        Case(rope_append_codes, name, partial(rope_appended, [121, 40], [1, 1], (4, 2), 128, **options))
        for name, options in FULL_PRECISION.items()
    ),
    *(
        Case(
            turboquant_attention,
            f"{name}-k{k}v{v}",
            partial(attend, [150, 37, 1], [1, 1, 1], (4, 2), 64, bits=(k, v), **options),
        )
        for name, options in FULL_PRECISION.items()
        for k, v in (PAIRS if name == "full-precision" else PAIRS[::4])
    ),
    *(
        Case(turboquant_attention, f"pairs-{name}-{kind}", partial(in_pairs, attend, **shape, **options), **tolerance)
        for (name, options), (kind, (shape, tolerance)) in product(FULL_PRECISION.items(), FULL_PRECISION_PAIRS.items())
    ),
    *(
        Case(rope_append_codes, f"pairs-{name}", partial(in_pairs, rope_appended, [121, 40], [1, 1], (4, 2), 128, **options))
        for name, options in FULL_PRECISION.items()
    ),
    *(
        Case(turboquant_attention, f"{name}-{kind}", partial(attend, **shape, **options), **tolerance)
        for (name, options), (kind, (shape, tolerance)) in product(FULL_PRECISION.items(), FULL_PRECISION_SHAPES.items())
    ),
    Case(turboquant_attention, "full-precision-head", lambda: attend([150, 2], [1, 1], (4, 2), 64, full_precision=(1, 0))),
    Case(turboquant_attention, "full-precision-recent", lambda: attend([150, 20], [3, 20], (4, 2), 64, full_precision=(0, 32))),
    *(
        Case(
            append_codes,
            f"full-precision-w{d}-{kind}",
            partial(append, [121, 3], [35, 3], 2, d, calibrated=True, full_precision=(2, 20), full_precision_dtype=dtype),
        )
        for d, kind, dtype in (
            (80, "bf16", BF16),
            (128, "bf16", BF16),
            (100, "f16", torch.float16),
            (256, "f16", torch.float16),
        )
    ),
    *(
        Case(
            turboquant_attention,
            f"full-precision-w{d}-{kind}-{new}",
            partial(
                attend, [150, 70], [new, 1], (4, 2), d, calibrated=True, full_precision=(3, 40), full_precision_dtype=dtype
            ),
        )
        for d, kind, dtype in ((100, "bf16", BF16), (128, "bf16", BF16), (60, "f16", torch.float16), (64, "f16", torch.float16))
        for new in (1, 5, 90)
    ),
    *(
        Case(
            turboquant_attention,
            f"fast-full-precision-decode-8k-k{k}v4",
            partial(decode_at, 8, k, 4, **FULL_PRECISION["full-precision"]),
            **FAST,
            **BENCH,
        )
        for k in (8, 4)
    ),
    Case(
        turboquant_attention,
        "fast-full-precision-prefill-512-of-2048-k8v4",
        partial(prefill_of, 2048, 8, **FULL_PRECISION["full-precision"]),
        **FAST,
        **BENCH,
        slow=True,
    ),
    Case(
        turboquant_partials,
        "full-precision-fast",
        lambda: attend([333], [1], (8, 2), 128, (8, 4), block=100, **FULL_PRECISION["full-precision"]),
        **FAST,
    ),
    Case(
        turboquant_partials,
        "full-precision-prefill",
        lambda: attend([150], [90], (4, 2), 64, block=40, sinks=True, **FULL_PRECISION["full-precision"]),
    ),
    Case(
        turboquant_attention,
        "fast-full-precision-mixed",
        lambda: attend([200, 150], [3, 1], (4, 2), 64, **FULL_PRECISION["full-precision"]),
        **FAST,
    ),
    # more sequences than threads, so that heads are processed sequentially, and three query heads per key head
    Case(
        turboquant_attention,
        "full-precision-many",
        lambda: attend(MANY, [1] * 8, (9, 3), 64, **FULL_PRECISION["full-precision"]),
    ),
    Case(
        turboquant_attention,
        "fast-full-precision-many",
        lambda: attend(MANY, [1] * 8, (9, 3), 64, **FULL_PRECISION["full-precision"]),
        **FAST,
    ),
    Case(
        turboquant_attention,
        "fast-full-precision-long",
        lambda: attend([3000], [1], (4, 1), 64, page=64, **FULL_PRECISION["full-precision"]),
        **FAST,
    ),
    Case(
        turboquant_partials,
        "full-precision",
        lambda: attend([70, 33], [1, 3], (4, 2), 64, block=16, calibrated=True, full_precision=(1, 8)),
    ),
]
