"""Replayed op calls (`simd/replay/call_cache.py`) match their Python: every op and case, at other addresses."""

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops import all_ops, append_codes, expert_mlp, linear, rms_norm, route, use_backend
from auraflux.ops._cases import Case, _pairs, all_cases
from auraflux.ops._dispatch import Op, exact
from auraflux.ops.moe.routing import Routing
from auraflux.ops.simd.replay import call_signature
from auraflux.ops.simd.replay.call_cache import CallCache
from auraflux.ops.simd.replay.launch_plan import LaunchPlan
from auraflux.ops.turboquant.codebook import Codebook
from auraflux.ops.turboquant.pages import Codebooks, CodePages
from auraflux.quant import quantize
from auraflux.validation import cached_on_instance
from tests.ops.quick import beyond, params

CASES = [case for case in all_cases() if not case.bench]
QUICK = 8  # cases of an op; test_parity.py has all of them
CALLS = 4  # the first runs its Python, two are recorded, one is replayed
UNPLANNED = {
    "choose_positions": "it returns a TokenSelection instead of tensors",
    "choose_coded_positions": "it returns a TokenSelection instead of tensors",
    "compress_windows": "torch fills its buffers with zeros",
    "embed": "Python reads the token ids",
    "sample": "Python reads the sampling settings",
}


def plans_of(op: Op) -> int:
    entries = op._call_cache.entries.values() if isinstance(op._call_cache, CallCache) else ()
    return sum(isinstance(entry, LaunchPlan) and entry.trusted for entry in entries)


def calls(case: Case, args: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Call an op several times with arguments at other addresses; yield the arguments and the result of each call."""
    alive = []
    for _ in range(CALLS):
        mine = copy.deepcopy(args)
        bound = inspect.signature(case.op.reference).bind(**mine)
        bound.apply_defaults()
        found = case.op(*bound.args)
        # while they are alive, no other call reuses their addresses
        alive.append((mine, found))
        yield mine, found


@pytest.mark.parametrize("case", params(CASES, also_slow=beyond(QUICK, CASES)))
def test_a_replayed_call_matches_its_python(case: Case):
    if case.op.kernel("cpu") is None:
        pytest.skip("no cpu kernel: the reference serves this op")
    args = case.args()
    with exact(case.exact):
        want = copy.deepcopy(args)
        expected = case.op.run(**want)
        for mine, found in calls(case, args):
            for path, one, other in _pairs({"the result": expected, **want}, {"the result": found, **mine}, ""):
                assert one.dtype == other.dtype, path
                assert torch.equal(one.nan_to_num(7), other.nan_to_num(7)), path


@pytest.mark.parametrize("op", all_ops(), ids=lambda op: op.name)
def test_every_op_has_plans_except_unplanned_ones(op: Op):
    if op.kernel("cpu") is None:
        pytest.skip("no cpu kernel: the reference serves this op")
    for case in [param.values[0] for param in params([case for case in CASES if case.op is op]) if not param.marks]:
        with exact(case.exact):
            for _ in calls(case, case.args()):
                pass
        if plans_of(op):
            break
    assert bool(plans_of(op)) == (op.name not in UNPLANNED), UNPLANNED.get(op.name, "none of its cases has a plan")


def widened(x: Tensor, tail: int) -> Tensor:
    """Return the same values as a view of wider rows."""
    wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + tail)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def replayed_norm(rows: int = 3, width: int = 52) -> tuple[Tensor, Tensor]:
    x, weight = torch.randn(rows, width), torch.randn(width)
    for _ in range(CALLS):
        rms_norm(x.clone(), weight.clone(), 1e-6)
    return x, weight


def test_bad_arguments_are_refused_despite_a_plan():
    x, weight = replayed_norm()
    before = plans_of(rms_norm)
    assert before
    refused: list[tuple[Any, ...]] = [
        (widened(x, 4), weight, 1e-6),
        (x, weight[:-1], 1e-6),
        (x, weight.to("meta"), 1e-6),
        (x, weight.to_sparse(), 1e-6),
        (x, weight, True),
        (x, weight),
    ]
    for each in refused:
        with pytest.raises(InputError):
            rms_norm(*each)
    assert plans_of(rms_norm) == before


@dataclass(slots=True)
class Slotted:
    x: int = 3


@dataclass
class Unset:
    x: Tensor


@dataclass(eq=False)
class Holder:
    x: Tensor


@pytest.mark.parametrize("x", [Slotted(), Slotted, Unset, object(), object])
def test_unsupported_objects_are_refused(x: Any):
    weight = torch.ones(8)
    rms_norm(torch.ones(2, 8), weight, 1e-6)
    with pytest.raises(InputError, match="rms_norm"):
        rms_norm(x, weight, 1e-6)


def test_exact_and_fast_calls_have_separate_plans():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 128), quantize(torch.randn(64, 128).bfloat16(), 4, 64)
    found = {}
    for wanted in (True, False, True, False):
        with exact(wanted):
            for _ in range(CALLS):
                found[wanted] = linear(x.clone(), weight)
            assert torch.equal(found[wanted], linear.run(x, weight))
    assert not torch.equal(found[True], found[False])
    with use_backend("reference"):
        assert torch.equal(linear(x, weight), linear.reference(x, weight))


def test_results_are_new_tensors():
    x, weight = replayed_norm(5, 36)
    first, second = rms_norm(x, weight, 1e-6), rms_norm(2 * x + 1, weight, 1e-6)
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, rms_norm.run(x, weight, 1e-6))


def test_bad_input_that_kernels_find_is_reported():
    torch.manual_seed(0)
    case = next(case for case in CASES if case.op is expert_mlp)
    with exact(case.exact):
        for _ in range(CALLS):
            expert_mlp(*case.args().values())
        bad = case.args()
        bad["ids"][0, 0] = 1_000_000_000
        with pytest.raises(InputError, match="1000000000"):
            expert_mlp(*bad.values())


def test_arguments_without_tensors_count_in_a_signature():
    logits = torch.randn(3, 8)
    for k in (1, 2):
        for _ in range(CALLS):
            ids, weights = route(logits.clone(), Routing(k, "softmax", renormalize=True))
        assert ids.shape == weights.shape == (3, k)


def copy_at_the_address_of_its_original(make: Callable[[], Any], use: Callable[[Any], Any]) -> Any:
    """Return a copy of a used object that lies where the original lay, by way of a copy that was not used."""
    for _ in range(1000):
        original = make()
        use(original)
        between, address = copy.copy(original), id(original)
        del original
        if id(found := copy.copy(between)) == address:
            return found
    pytest.skip("no copy lay at the address of its original")


def test_a_copy_at_the_address_of_its_original_is_described_anew():
    def describe(weight: Any) -> list[int]:
        addresses: list[int] = []
        call_signature.describe([weight], [], addresses)
        return addresses

    found = copy_at_the_address_of_its_original(lambda: Holder(torch.ones(8)), describe)
    # as `deepcopy` leaves it
    found.x = torch.ones(8)
    assert describe(found) == [found.x.data_ptr()]


def test_cached_results_belong_to_one_instance():
    address = cached_on_instance(lambda holder: holder.x.data_ptr())
    found = copy_at_the_address_of_its_original(lambda: Holder(torch.ones(8)), address)
    found.x = torch.ones(8)
    assert address(found) == found.x.data_ptr()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_deep_copies_of_used_objects_are_described_anew(copied: Callable[[Any], Any]):
    original, addresses = Holder(torch.ones(8)), []
    call_signature.describe([original], [], [])
    found = copied(original)
    call_signature.describe([found], [], addresses)
    assert addresses == [found.x.data_ptr()] != [original.x.data_ptr()]


def test_plans_serve_other_codebooks_of_the_same_shape():
    """Addresses derived from a codebook, which two pages share, are constants of a plan."""
    torch.manual_seed(0)
    k, v, starts = torch.randn(4, 2, 32), torch.randn(4, 2, 32), torch.tensor([0, 4], dtype=torch.int32)

    def pages(levels: Tensor) -> Callable[[], CodePages]:
        book = Codebook(levels)
        table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
        return lambda: replace(
            CodePages.empty(1, 2, 16, 32, table.clone(), lengths.clone(), 4, 4), codebooks=Codebooks(book, book)
        )

    def codes(into: CodePages, run: Callable[..., Any]) -> Tensor:
        run(k, v, into, starts)
        return into.key_codes

    first, second = pages(torch.linspace(-0.4, 0.4, 16)), pages(torch.linspace(-0.9, 0.1, 16))
    # the first call and two recordings with equal plans, of different pages
    for into in [first() for _ in range(CALLS)]:
        codes(into, append_codes)
    for _ in range(2):
        assert torch.equal(codes(second(), append_codes), codes(second(), append_codes.run))


def test_numbers_of_evicted_structures_are_not_reused(monkeypatch):
    number = lru_cache(4)(call_signature._number.__wrapped__)
    monkeypatch.setattr(call_signature, "_number", number)
    weights = [quantize(torch.zeros(rows, 64), 4, 64) for rows in range(1, 12)]
    keys: list[list[Any]] = [[] for _ in weights]
    for weight, key in zip(weights, keys, strict=True):
        call_signature.describe([weight], key, [])
        assert number.cache_info().currsize <= 4
    assert len({tuple(key) for key in keys}) == len(weights)
