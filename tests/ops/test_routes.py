"""The tables that choose kernels: what they say, that every route is taken by something, and that a page tells of it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from auraflux.ops import append_codes, mixture, turboquant_attention
from auraflux.ops._cases import Case
from auraflux.ops._dispatch import Declined
from auraflux.ops.moe.experts import Experts
from auraflux.ops.moe.routing import Routing
from auraflux.ops.routes import Route, Routes, Verdict, routes_of, verdict_of
from auraflux.ops.turboquant._inputs import attend
from auraflux.quant import QTensor

pytest.importorskip("triton")
from auraflux.cli.kernels_page import kernels_page
from auraflux.ops.assumed import assume_gpu
from auraflux.ops.explain import all_verdicts, cases_of, chosen_ops, explained, taken
from auraflux.ops.hopper.device import not_hopper

BF16 = torch.bfloat16
DOCS = Path(__file__).parents[2] / "docs"


def below(limit: int) -> Routes[int, str]:
    def refuses(number: int) -> str | None:
        return None if number < limit else f"{number} is not below {limit}"

    return Routes(Route(f"below {limit}", refuses, lambda number: f"{number} by the small one"))


def test_the_first_that_does_not_refuse_runs():
    table = Routes(*below(2), *below(9), *below(5))
    assert table(1) == "1 by the small one"
    assert table.explain(3) == Verdict("below 9", (("below 2", "3 is not below 2"),))
    assert table.explain(9).taken is None
    with pytest.raises(Declined, match="9 is not below 5"):
        table(9)


def test_what_a_route_asks_is_explained_too():
    inner = below(4)
    outer: Routes[int, str] = Routes(
        Route("half of it", lambda number: None, lambda number: inner(number // 2), lambda number: [(inner, number // 2)])
    )
    assert outer(6) == "3 by the small one"
    assert outer.explain(6).path == "half of it (below 4)"


def test_a_machine_without_a_gpu_can_be_asked():
    device = torch.device("cpu")
    assert not_hopper(device) is not None
    with assume_gpu():
        assert not_hopper(device) is None
    assert not_hopper(device) is not None


@pytest.fixture(scope="module")
def verdicts() -> dict[Case, Verdict]:
    return all_verdicts()


def empty(*shape: int, bits: int = 4) -> QTensor:
    """A weight, or a stack of them, that nobody reads; memory is not touched."""
    *rest, width = shape
    scales, biases = (torch.empty(*rest, width // 64, dtype=BF16) for _ in range(2))
    return QTensor(torch.empty(*rest, width * bits // 32, dtype=torch.int32), scales, biases, bits, 64, shape)


def product(tokens: int, rows: int, width: int, bits: int = 4) -> Verdict:
    from auraflux.ops.linear.cuda.call import Call
    from auraflux.ops.linear.cuda.routes import PRODUCTS

    with assume_gpu():
        return PRODUCTS.explain(Call(torch.empty(tokens, width, dtype=BF16), [empty(rows, width, bits=bits)]))


def wide_experts() -> Verdict | None:
    gate, up, down = empty(8, 2048, 7168), empty(8, 2048, 7168), empty(8, 7168, 2048)
    x, scores = torch.empty(1, 7168, dtype=BF16), torch.empty(1, 8, dtype=BF16)
    arguments = {"x": x, "scores": scores, "routing": Routing(2, "softmax", True), "experts": Experts(gate, up, down), "h": x}
    with assume_gpu():
        return verdict_of(mixture, "cuda", arguments)


def long_prompt() -> Verdict | None:
    return explained(next(case for case in cases_of(append_codes) if case.slow))


def many_queries() -> Verdict | None:
    with assume_gpu():
        return verdict_of(turboquant_attention, "cuda", attend([200], [150], (2, 1), 64, (8, 4), page=64, dtype=BF16))


# routes that only arguments too large for a quick case take
LARGE: dict[tuple[str, str], Callable[[], Verdict | None]] = {
    ("linear", "matvec_int4_tma"): partial(product, 1, 8192, 16384),
    ("linear", "matvec_int8"): partial(product, 1, 8192, 8192, 8),
    ("linear", "dequantized in bf16, then cuBLAS"): partial(product, 2000, 4096, 4096),
    ("moe", "matvec_tma"): wide_experts,
    ("turboquant", "encode_prefill"): long_prompt,
    ("turboquant", "dequantized, then attention"): many_queries,
}


@pytest.mark.parametrize(("family", "name"), LARGE)
def test_large_arguments_take_their_route(family: str, name: str):
    verdict = LARGE[family, name]()
    assert verdict is not None
    assert name in taken(verdict)


def test_every_route_is_taken_by_something(verdicts: dict[Case, Verdict]):
    names = {(op.family, route.name) for op in chosen_ops() for route in routes_of(op, "cuda") or ()}
    reached = {(case.op.family, name) for case, verdict in verdicts.items() for name in taken(verdict)}
    assert names - reached - set(LARGE) == set()


def test_every_refusal_is_a_few_words(verdicts: dict[Case, Verdict]):
    reasons = {reason for verdict in verdicts.values() for _, reason in verdict.refused}
    assert reasons
    assert [reason for reason in reasons if not 3 < len(reason) <= 140 or reason.endswith(".") or "\n" in reason] == []


def test_the_page_about_kernels_is_not_stale(verdicts: dict[Case, Verdict]):
    assert (DOCS / "kernels.md").read_text() == kernels_page(chosen_ops(), verdicts), "run `make docs`"
