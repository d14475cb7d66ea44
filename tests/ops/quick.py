"""Selection of the cases that run with the quick tests on CPU; the others run with the slow ones."""

import re
from collections.abc import Container, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

from auraflux.ops._cases import Case

# they distinguish routes on a GPU; on CPU they take the same routes as smaller ones, but longer
LARGE = {
    *(f"expert_mlp-{name}-bf16" for name in ("leaning", "two-thousand", "thousands", "deep-quads", "wide-quads")),
    *(f"expert_parts-{name}-bf16" for name in ("two-thousand", "thousands")),
    *(f"expert_mlp-{name}-bf16" for name in ("thousand", "hundreds", "some-quads")),
    *(f"mixture-{name}" for name in ("thousands-bf16", "one-token-bf16", "some-wide", "some-tokens", "some-deep")),
    *(f"mixture-{name}" for name in ("some-by-sigmoid", "some-shared-weights", "shared-weights-bf16", "wide-shared-bf16")),
    *(f"gated_delta_prefill-bf16-{name}" for name in ("many-heads", "many-ragged")),
    *(f"turboquant_latent_attention-16-bits-{name}" for name in ("64-heads-b4", "64-heads-b8", "full-precision-64-heads-b4")),
    *("add_norm_gate_up-many-rows", "add_norm_linears-many-rows-narrow"),
}
# each format of products compiles for seconds, fast and exact. The quick cases cover all widths of codes, groups, types of
# scales and kinds of codes, most in one mode; test_super_blocks.py covers fast products of q2k, q3k, q6k, iq4 and nvfp4
FORMATS = re.compile(
    r"linear-((2bit-g64|6bit-g64|fp8-g32)-\d+|6bit-row-order)(-fast)?$|linear-3bit-g64-\d+-fast$"
    r"|linear-((fp8-g128|q[23]k)-\d+|q3k-row-order|bf16-q2k-.*|bf16-some-tokens-bias)$|linears-bf16-6bit-4$"
    r"|linear-((5bit-g64|2bit-g128|iq4)-1|(8bit-g64|mxfp4|nvfp4)-1-fast)$"
    # and test_grids.py all products with grids
    r"|(linear|expert_mlp|embed)-(bf16-|many-)?iq[123]_.*$"
    r"|gate_up_swiglu-bf16-2bit-one-token$|expert_mlp-(mixed-bits|many-2-and-5-bits|many-q3k)$"
    # latents are unpacked in the same way for queries, whose quick cases cover all widths
    r"|latent_output-[2-68]-bits$"
)
# rows are compiled for their width: the quick cases have powers of two, and 63 and 100, which are none. test_turboquant.py
# covers all combinations of key and value bits
WIDTHS = re.compile(r"(encode|append_codes)-.*w(60|80|96|256|512)\b|turboquant_attention-.*w(32|60|80|96|512)\b")
BITS = re.compile(r"turboquant_attention-(?:(fast|full-precision|pairs)-)?k([23468])v([23468])(?:w(64|128|256))?$")


def _is_sampled(name: str) -> bool:
    """Return whether a case is in a set that covers every number of key bits, of value bits, and every width."""
    if (found := BITS.match(name)) is None:
        return True
    kind, k, v, width = found.groups()
    if width is None:
        return ("23468".index(v) - "23468".index(k)) % 5 == ("", "fast", "full-precision").index(kind or "")
    # bits other than two, four and eight have few cases
    return not {k, v} <= set("248") or ("248".index(k) + "248".index(v) + ("64", "128", "256").index(width)) % 3 == 0


def some(values: Iterable[Any], quick: Container[Any]) -> list:
    """Return values as parameters of a test, a few of them quick."""
    return [pytest.param(value, marks=[] if value in quick else [pytest.mark.slow]) for value in values]


def by_pairs(*axes: Sequence[Any]) -> list:
    """Return all combinations of values as parameters of a test; a few that cover every pair of values are quick."""
    every = list(product(*axes))
    pairs = {each: set(combinations(enumerate(each), 2)) for each in every}
    missing, quick = set().union(*pairs.values()), set()
    while missing:
        best = max(every, key=lambda each: len(pairs[each] & missing))
        quick.add(best)
        missing -= pairs[best]
    return [pytest.param(*each, marks=[] if each in quick else [pytest.mark.slow]) for each in every]


def beyond(most: int, cases: Sequence[Case]) -> set[str]:
    """Return the cases to move to the slow tests: those beyond an op's limit, the quick ones spread over all."""
    left = set()
    for name in {case.op.name for case in cases}:
        mine = [param.id for param in params([case for case in cases if case.op.name == name]) if not param.marks]
        # odd, so that of cases in pairs and fours all members occur
        left |= {*mine} - {*mine[:: -(-len(mine) // most) | 1]}
    return left


def params(cases: Sequence[Case], also_slow: Iterable[str] = ()) -> list:
    """Return cases as parameters of a test; benchmark sizes are slow, too."""
    left = {*LARGE, *also_slow}
    slow = [
        case.slow
        or case.bench
        or case.id in left
        or any(each.match(case.id) for each in (FORMATS, WIDTHS))
        or not _is_sampled(case.id)
        for case in cases
    ]
    return [
        pytest.param(case, id=case.id, marks=[pytest.mark.slow] if late else []) for case, late in zip(cases, slow, strict=True)
    ]
