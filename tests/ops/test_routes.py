"""Route tables: their decisions, that every route is taken by some call, and that docs/kernels.md is current."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from auraflux import ops
from auraflux.ops import append_codes, attention, expert_mlp, invariant, mixture, turboquant_attention
from auraflux.ops._cases import Case, in_row_layout
from auraflux.ops._dispatch import Declined, activation_bits, families, fp8_products
from auraflux.ops.attention.pages import KVPages
from auraflux.ops.fake_gpu import HOPPER, Capability, use_fake_gpu
from auraflux.ops.linear.cpu.routes import DRIVERS
from auraflux.ops.linear.reference import Weight
from auraflux.ops.moe.experts import Experts
from auraflux.ops.moe.routing import Routing
from auraflux.ops.routes import Explanation, Route, Routes, explain_call, without_routes
from auraflux.ops.simd.isa import ISA
from auraflux.ops.turboquant.cases.inputs import attend
from auraflux.quant import QTensor

pytest.importorskip("triton")
from auraflux.cli.output.kernels_page import kernels_page
from auraflux.ops.explain import BACKENDS, cases_of, explain_all_cases, explain_case, taken
from auraflux.ops.gpu.device import not_wgmma
from auraflux.ops.linear.cuda.call import Call, Norm
from auraflux.ops.linear.cuda.limits import key
from auraflux.ops.linear.cuda.routes import PRODUCTS

BF16 = torch.bfloat16
DOCS = Path(__file__).parents[2] / "docs"


def below(limit: int) -> Routes[int, str]:
    def refuses(number: int) -> str | None:
        return None if number < limit else f"{number} is not below {limit}"

    return Routes(Route(f"below {limit}", refuses, lambda number: f"{number} by the small one"))


def test_the_first_that_does_not_refuse_runs():
    table = Routes(*below(2), *below(9), *below(5))
    assert table(1) == "1 by the small one"
    assert table.explain(3) == Explanation("below 9", (("below 2", "3 is not below 2"),))
    assert table.explain(9).taken is None
    with pytest.raises(Declined, match="9 is not below 5"):
        table(9)


class PTXASError(Exception):
    """As Triton's, by name."""


@pytest.mark.parametrize("key", [None, lambda number: number])
def test_a_route_whose_kernel_does_not_compile_is_left_out(key: Any, caplog: pytest.LogCaptureFixture):
    def fails(number: int) -> str:
        if number < 0:
            raise ValueError("a mistake in the kernel's Python")
        raise PTXASError("PTXAS error: many lines\nline 3; error   : Feature 'x' requires .target sm_90 or higher\nRepro")

    never = lambda number: None  # noqa: E731
    table = Routes(Route("new", never, fails), Route("old", never, lambda number: f"{number} by the old one"), key=key)
    with pytest.raises(ValueError, match="a mistake"):
        table(-1)
    assert [table(3), table(3), table(4)] == ["3 by the old one", "3 by the old one", "4 by the old one"]
    (refused,) = table.explain(3).refused
    assert refused[0] == "new"
    assert "requires .target sm_90" in refused[1]
    assert [record.getMessage().count("the next route runs instead") for record in caplog.records] == [1]
    last = Routes(Route("new", never, fails), key=key)
    with pytest.raises(Declined, match="does not compile"):
        last(3)


def test_only_batch_invariant_routes_are_taken_inside_invariant():
    never = lambda number: None  # noqa: E731
    table = Routes(Route("quick", never, lambda number: "quick"), Route("same", never, lambda number: "same", invariant=True))
    cached = Routes(*table, key=lambda number: number)
    for routes in (table, cached):
        assert routes(1) == "quick"
        with invariant():
            assert routes(1) == "same"
            assert routes.explain(1).taken == "same"
        assert routes(1) == "quick"
    # all routes of a table are batch-invariant if none is marked
    with invariant():
        assert below(2)(1) == "1 by the small one"
        with pytest.raises(Declined, match="not for it"):
            Routes(Route("quick", never, str), Route("other", lambda number: "not for it", str, invariant=True))(1)


def by_half(inner: Routes[int, str]) -> Routes[int, str]:
    return Routes(
        Route("half of it", lambda number: None, lambda number: inner(number // 2), lambda number: [(inner, number // 2)])
    )


def test_nested_tables_are_explained_too():
    outer = by_half(below(4))
    assert outer(6) == "3 by the small one"
    assert outer.explain(6).path == "half of it (below 4)"


def test_routes_are_excluded_from_all_tables():
    outer, less = by_half(Routes(*below(4), *below(5))), frozenset(["below 4"])
    assert outer.explain(6, less).path == "half of it (below 5)"
    assert outer.explain(10, less).then[0].taken is None
    with without_routes(less):
        assert outer(6) == "3 by the small one"
        with pytest.raises(Declined, match="5 is not below 5"):
            outer(10)
    assert outer.explain(6).path == "half of it (below 4)"


def test_calls_of_one_key_take_one_route():
    evaluated = []

    def refuses(number: int) -> str | None:
        evaluated.append(number)
        return None if number < 10 else "too large"

    table: Routes[int, int] = Routes(Route("small", refuses, lambda number: number), key=lambda number: number // 5)
    assert [table(number) for number in (1, 2, 7, 3)] == [1, 2, 7, 3]
    assert evaluated == [1, 7]
    for _ in range(2):
        with pytest.raises(Declined, match="too large"):
            table(12)


def shifted(*shape: int, dtype: torch.dtype, aligned: bool) -> torch.Tensor:
    """Return an uninitialized tensor, aligned to 16 bytes or not."""
    size = prod(shape)
    whole = torch.empty(size + 64, dtype=dtype)
    first = -whole.data_ptr() % 64 // whole.element_size() + (0 if aligned else 1)
    return whole[first : first + size].view(shape)


def random_weight(pick: Random, rows: int, width: int) -> Weight:
    aligned = pick.random() < 0.8
    if pick.random() < 0.3:
        return shifted(rows, width, dtype=pick.choice([BF16, BF16, torch.float32]), aligned=aligned)
    bits, group = pick.choice([(4, 64), (4, 64), (4, 64), (8, 64), (3, 32)])
    packed = shifted(rows, width * bits // 32, dtype=torch.int32, aligned=aligned)
    scales = pick.choice([BF16, BF16, torch.float16])
    tables = [shifted(rows, width // group, dtype=scales, aligned=pick.random() < 0.8) for _ in range(2)]
    return QTensor(packed, *tables, bits, group, (rows, width))


def random_weights(pick: Random) -> list[Weight]:
    width, count = pick.choice([256, 1024, 2048]), pick.choice([1, 2, 2, 3])
    weights = [random_weight(pick, pick.choice([16, 128, 200, 5000]), width) for _ in range(count)]
    return weights[:1] * count if pick.random() < 0.7 else weights


def random_product(pick: Random, weights: list[Weight]) -> Call:
    tokens, width = pick.choice([1, 1, 2, 17, 1500]), weights[0].shape[1]
    x = shifted(tokens, width, dtype=pick.choice([BF16, BF16, torch.float32]), aligned=pick.random() < 0.7)
    biases = pick.choice([None, None, [torch.empty(weight.shape[0]) for weight in weights]])
    scale = torch.empty(width, dtype=pick.choice([torch.float32, torch.float32, BF16]))
    norm = pick.choice([None, Norm(None, scale, 1e-6), Norm(x, scale, 1e-6)])
    if len(weights) == 2 and pick.random() < 0.5:
        return Call(x, weights, gated=True, norm=norm)
    return Call(x, weights, biases, norm=norm, needs_normed=norm is not None and pick.random() < 0.5)


@pytest.mark.parametrize("seed", range(4))
def test_a_cached_route_is_the_one_of_the_table(seed: int):
    pick, table = Random(seed), Routes(*PRODUCTS, key=PRODUCTS.key)
    some, found = [random_weights(pick) for _ in range(16)], set()
    with use_fake_gpu():
        for _ in range(1500):
            call = random_product(pick, pick.choice(some))
            remembered = table._lookup(key(call), call)
            assert remembered.name == table.explain(call).taken
            found.add(remembered.name)
    assert len(found) > 6


def test_routes_are_explained_without_a_gpu():
    device = torch.device("cpu")
    assert not_wgmma(device) is not None
    with use_fake_gpu():
        assert not_wgmma(device) is None
    assert not_wgmma(device) is not None


@pytest.fixture(scope="module")
def verdicts() -> dict[str, dict[Case, Explanation]]:
    return explain_all_cases()


def tables_of(backend: str) -> dict[Routes[Any, Any], set[str]]:
    """Return every table of a backend with the families that use it."""
    found: dict[Routes[Any, Any], set[str]] = {}
    for family in families():
        if (Path(ops.__path__[0]) / family / backend / "routes.py").exists():
            for table in vars(import_module(f"auraflux.ops.{family}.{backend}.routes")).values():
                if isinstance(table, Routes):
                    found.setdefault(table, set()).add(family)
    return found


def empty(*shape: int, bits: int = 4) -> QTensor:
    """Return an uninitialized weight or stack of weights; memory is not touched."""
    *rest, width = shape
    scales, biases = (torch.empty(*rest, width // 64, dtype=BF16) for _ in range(2))
    return QTensor(torch.empty(*rest, width * bits // 32, dtype=torch.int32), scales, biases, bits, 64, shape)


def product(tokens: int, rows: int, width: int, bits: int = 4, capability: Capability = HOPPER) -> Explanation:
    with use_fake_gpu(capability):
        return PRODUCTS.explain(Call(torch.empty(tokens, width, dtype=BF16), [empty(rows, width, bits=bits)]))


def several_products(tokens: int, rows: tuple[int, ...], width: int) -> Explanation:
    """Explain several weights on a GPU without wgmma."""
    with use_fake_gpu((8, 9)):
        return PRODUCTS.explain(Call(torch.empty(tokens, width, dtype=BF16), [empty(count, width) for count in rows]))


def wide_experts() -> Explanation | None:
    gate, up, down = empty(8, 2048, 7168), empty(8, 2048, 7168), empty(8, 7168, 2048)
    x, scores = torch.empty(1, 7168, dtype=BF16), torch.empty(1, 8, dtype=BF16)
    arguments = {"x": x, "scores": scores, "routing": Routing(2, "softmax", True), "experts": Experts(gate, up, down), "h": x}
    with use_fake_gpu():
        return explain_call(mixture, "cuda", arguments)


def long_prompt() -> Explanation | None:
    return explain_case(next(case for case in cases_of(append_codes) if case.slow))


def many_queries() -> Explanation | None:
    with use_fake_gpu():
        return explain_call(turboquant_attention, "cuda", attend([200], [150], (2, 1), 64, (8, 4), page=64, dtype=BF16))


def piece(tokens: int, positions: int, window: int | None = None) -> str:
    """Return the route of a prefill chunk, 32 query heads on 8 key heads."""
    k, v = (torch.empty(positions // 64, 8, 64, 128, dtype=BF16) for _ in range(2))
    lengths, starts = torch.tensor([positions], dtype=torch.int32), torch.tensor([0, tokens], dtype=torch.int32)
    pages = KVPages(k, v, torch.zeros(1, positions // 64, dtype=torch.int32), lengths)
    arguments = {
        "q": torch.empty(tokens, 32, 128, dtype=BF16),
        "pages": pages,
        "starts": starts,
        "scale": 1.0,
        "window": window,
    }
    with use_fake_gpu():
        verdict = explain_call(attention, "cuda", arguments)
    assert verdict is not None
    return str(verdict.taken)


@pytest.mark.parametrize(
    ("tokens", "unsplit", "split"), [(32, None, 1024), (64, 2048, 4096), (128, 8192, 16384), (256, 65536, None)]
)
def test_keys_are_split_where_a_prefill_chunk_has_too_few_programs(tokens: int, unsplit: int | None, split: int | None):
    assert unsplit is None or piece(tokens, unsplit) == "prefill"
    assert split is None or piece(tokens, split) == "flash_paged"
    assert tokens < 64 or piece(tokens, 16384, window=1024) == "prefill"


def on_older_gpu(op: ops.Op, name: str) -> Explanation | None:
    """Explain a case on a GPU with neither wgmma nor TMA."""
    case = next(case for case in cases_of(op) if case.name == name)
    with use_fake_gpu((8, 9)):
        return explain_call(case.op, "cuda", in_row_layout(case.args()))


def in_fp8() -> Explanation | None:
    with fp8_products():
        return product(2048, 4096, 4096)


# routes that need another GPU or a request, or arguments too large for a quick case
LARGE: dict[tuple[str, str], Callable[[], Explanation | None]] = {
    ("linear", "matvec_int4_tma"): partial(product, 1, 8192, 16384),
    ("linear", "gemm_fp8"): in_fp8,
    ("linear", "matvec_int4_loop"): partial(product, 1, 32000, 4096),
    ("linear", "matvec_int8"): partial(product, 1, 8192, 8192, 8),
    ("linear", "gemm_int4_tiles"): partial(product, 32, 8192, 8192, capability=(8, 9)),
    ("linear", "gemm_int4_tiles of several"): partial(several_products, 32, (4096, 1024), 4096),
    ("attention", "latents_mma"): partial(on_older_gpu, ops.latent_attention, "few-heads-bf16"),
    ("turboquant", "latents_mma"): partial(on_older_gpu, ops.turboquant_latent_attention, "16-bits-16-heads-b8"),
    ("moe", "grouped_mma"): partial(on_older_gpu, ops.expert_mlp, "thousands-bf16"),
    ("attention", "prefill_mma"): partial(on_older_gpu, attention, "bf16-prefill"),
    ("delta", "prefill_mma"): partial(on_older_gpu, ops.gated_delta_prefill, "bf16-chunks"),
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


# cases for routes that are taken inside `invariant` only
INVARIANT_CASES = [
    case for op in (ops.linear, ops.add_norm_linears, ops.gated_delta_prefill) for case in cases_of(op) if not case.slow
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_route_is_taken_by_something(backend: str, verdicts: dict[str, dict[Case, Explanation]]):
    reached = {(case.op.family, name) for case, verdict in verdicts[backend].items() for name in taken(verdict)}
    if backend == "cpu" and not ISA.half_products:
        reached.add(("linear", "activations in half precision"))
    if backend == "cpu" and not ISA.matrix_tiles:
        reached |= {("linear", f"activations in {kind} with AMX") for kind in ("int8", "int16", "float32")}
    if backend == "cpu":
        with activation_bits(16):
            reached |= {("linear", name) for name in taken(DRIVERS.explain(empty(64, 128)))}
        if not ISA.digits:
            reached.add(("linear", "activations in int16"))
    if backend == "cuda":
        reached |= set(LARGE)
        with invariant():
            explained = [(case, explain_case(case)) for case in INVARIANT_CASES]
        reached |= {(case.op.family, name) for case, verdict in explained if verdict is not None for name in taken(verdict)}
    rows = [
        ({(family, route.name) for family in users}, route) for table, users in tables_of(backend).items() for route in table
    ]
    assert [route.name for names, route in rows if not names & reached] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_refusal_is_a_few_words(backend: str, verdicts: dict[str, dict[Case, Explanation]]):
    reasons = {reason for verdict in verdicts[backend].values() for _, reason in verdict.refused}
    assert reasons
    assert [reason for reason in reasons if not 3 < len(reason) <= 140 or reason.endswith(".") or "\n" in reason] == []


def test_routes_on_cpu():
    found = {
        case.name: explain_case(case, "cpu") for case in cases_of(expert_mlp) if case.name in ("mixed-bits", "uneven-bits")
    }
    paths = {name: verdict.path for name, verdict in found.items() if verdict is not None}
    one_list, two_lists = "gate and up in one list", "gate and up in two lists"
    tiles = " with AMX" if ISA.matrix_tiles else ""
    assert paths == {
        name: f"{how} (activations in float32{tiles})" for name, how in zip(paths, (one_list, two_lists), strict=True)
    }


def test_the_page_about_kernels_is_not_stale(verdicts: dict[str, dict[Case, Explanation]]):
    assert (DOCS / "kernels.md").read_text() == kernels_page(verdicts["cuda"]), "run `make docs`"
