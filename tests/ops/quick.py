"""Which cases the quick tests on a CPU leave to the slow ones."""

import re
from collections.abc import Iterable, Sequence

import pytest

from auraflux.ops._cases import Case

# they tell the routes of a GPU apart; on a CPU they take the ways of smaller ones, for longer
LARGE = {
    *(f"expert_mlp-{name}-bf16" for name in ("leaning", "two-thousand", "thousands", "deep-quads", "wide-quads")),
    *(f"expert_parts-{name}-bf16" for name in ("two-thousand", "thousands")),
    *("mixture-thousands-bf16", "add_norm_gate_up-many-rows", "add_norm_linears-many-rows-narrow"),
}
# test_turboquant.py goes through all widths, and through all bits of keys with all of values
WIDTHS = re.compile(r"(encode|append_codes|turboquant_attention)-.*w(60|80|512)\b")
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


def params(cases: Sequence[Case], also_slow: Iterable[str] = ()) -> list:
    """Cases as parameters of a test; sizes of the benchmark are among the slow ones too."""
    left = {*LARGE, *also_slow}
    slow = [case.slow or case.bench or case.id in left or WIDTHS.match(case.id) or not _is_sampled(case.id) for case in cases]
    return [
        pytest.param(case, id=case.id, marks=[pytest.mark.slow] if late else []) for case, late in zip(cases, slow, strict=True)
    ]
