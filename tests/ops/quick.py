"""Which cases the quick tests on a CPU leave to the slow ones."""

import re
from collections.abc import Container, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

from auraflux.ops._cases import Case

# they tell the routes of a GPU apart; on a CPU they take the ways of smaller ones, for longer
LARGE = {
    *(f"expert_mlp-{name}-bf16" for name in ("leaning", "two-thousand", "thousands", "deep-quads", "wide-quads")),
    *(f"expert_parts-{name}-bf16" for name in ("two-thousand", "thousands")),
    *(f"mixture-{name}" for name in ("thousands-bf16", "one-token-bf16", "some-wide")),
    *("add_norm_gate_up-many-rows", "add_norm_linears-many-rows-narrow"),
}
# products are compiled for seconds in every format and contract. Those that stay have all widths of codes, groups, types of
# scales and kinds of codes in both contracts; test_super_blocks.py has q2k, q3k, q6k and iq4 as they are multiplied fast
FORMATS = re.compile(
    r"linear-((2bit-g64|6bit-g64|fp8-g32)-\d+|6bit-row-order)(-fast)?$|linear-3bit-g64-\d+-fast$"
    r"|linear-((fp8-g128|q[23]k)-\d+|q3k-row-order|bf16-q2k-.*|bf16-some-tokens-bias)$|linears-bf16-6bit-4$"
    r"|gate_up_swiglu-bf16-2bit-one-token$|expert_mlp-(mixed-bits|many-2-and-5-bits|many-q3k)$"
    # latents are unpacked in the same way for queries, where all widths stay
    r"|latent_output-[2-68]-bits$"
)
# rows are compiled for their width: those that stay are powers of two, and 63 and 100, which are none. test_turboquant.py goes
# through all bits of keys with all of values
WIDTHS = re.compile(r"(encode|append_codes)-.*w(60|80|96|256|512)\b|turboquant_attention-.*w(32|60|80|96|512)\b")
BITS = re.compile(r"turboquant_attention-(?:(fast|kept|pairs)-)?k([23468])v([23468])(?:w(64|128|256))?$")


def _is_sampled(name: str) -> bool:
    """Whether a case is one of those in which every bit width of keys, of values, and every width occurs."""
    if (found := BITS.match(name)) is None:
        return True
    kind, k, v, width = found.groups()
    if width is None:
        return ("23468".index(v) - "23468".index(k)) % 5 == ("", "fast", "kept").index(kind or "")
    # others than two, four and eight are few
    return not {k, v} <= set("248") or ("248".index(k) + "248".index(v) + ("64", "128", "256").index(width)) % 3 == 0


def some(values: Iterable[Any], quick: Container[Any]) -> list:
    """Values as parameters of a test, of which a few are quick."""
    return [pytest.param(value, marks=[] if value in quick else [pytest.mark.slow]) for value in values]


def by_pairs(*axes: Sequence[Any]) -> list:
    """Every combination of values as parameters of a test; a few in which every pair of values occurs are quick."""
    every = list(product(*axes))
    pairs = {each: set(combinations(enumerate(each), 2)) for each in every}
    missing, quick = set().union(*pairs.values()), set()
    while missing:
        best = max(every, key=lambda each: len(pairs[each] & missing))
        quick.add(best)
        missing -= pairs[best]
    return [pytest.param(*each, marks=[] if each in quick else [pytest.mark.slow]) for each in every]


def beyond(most: int, cases: Sequence[Case]) -> set[str]:
    """The cases of ops that have more quick ones than so many, without those that stay, which are spread over all."""
    left = set()
    for name in {case.op.name for case in cases}:
        mine = [param.id for param in params([case for case in cases if case.op.name == name]) if not param.marks]
        # odd, so that of cases in pairs and fours all members occur
        left |= {*mine} - {*mine[:: -(-len(mine) // most) | 1]}
    return left


def params(cases: Sequence[Case], also_slow: Iterable[str] = ()) -> list:
    """Cases as parameters of a test; sizes of the benchmark are among the slow ones too."""
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
