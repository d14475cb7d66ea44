"""Every op, every case on CUDA kernels: in Triton's interpreter on small shapes, and on the GPU where there is one."""

import inspect
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from auraflux.bench.arguments import moved
from auraflux.ops._cases import Case, all_cases, compare, in_row_layout, tensors
from auraflux.ops.linear._inputs import pair, product, several
from auraflux.ops.linear.reference import gate_up_swiglu, linear, linears
from auraflux.ops.turboquant.cases.inputs import append, attend, in_pairs, rope_appended
from auraflux.ops.turboquant.reference import append_codes, rope_append_codes, turboquant_attention

pytest.importorskip("triton")
CASES = all_cases()
NAMES = {case.id for case in CASES}
# a program of the interpreter takes milliseconds, and large arguments are many programs
LARGEST_NBYTES = 1 << 18
MOST_CASES = 2  # of an op in the quick tests
# these take seconds: they are among the slow tests, and in their place others of the op
LONG = {
    "linear-2bit-g64-1": "linear-few-rows",
    "linears-one-token-exact": "linears-few-rows",
    "linears-bf16-40-tokens-4bit": "linears-mixed-bits",
    "gate_up_swiglu-one-odd-token": "gate_up_swiglu-few-rows",
    "gate_up_swiglu-bf16-one-token": "gate_up_swiglu-dense",
    "add_norm_linears-bf16-1-256": "add_norm_linears-biases",
    "add_norm_gate_up-bf16": "add_norm_gate_up-many-tokens",
    "latent_output-bf16-2-b4": "latent_output-4-bits",
    "channel_gates-many-tokens": "channel_gates-odd",
    "expert_mlp-many-q3k": "expert_mlp-limited",
    "expert_mlp-iq2_xxs-40": "expert_mlp-iq2_xxs-2",
    "turboquant_latent_attention-full-precision-w63-f32-5": "turboquant_latent_attention-full-precision-w63-f32-1",
    "append_codes-pairs-k3v3w128": "append_codes-few-pairs-k3v3w128",
    "rope_append_codes-pairs-k2v2": "rope_append_codes-few-pairs-k2v2",
    "rope_append_codes-many-tokens": "rope_append_codes-interleaved",
}
# one token, or three: a program of a product, which has four rows, takes a fifth of a second
FEW_ROWS = [
    Case(linear, "few-rows", lambda: product(1, 7, 256, 4)),
    Case(linears, "few-rows", lambda: several(1, (5, 3), 128, 4)),
    Case(gate_up_swiglu, "few-rows", lambda: pair(1, 7, 192, 3)),
    Case(append_codes, "few-pairs-k3v3w128", lambda: in_pairs(append, [21, 9], [2, 1], 2, 128, bits=(3, 3))),
    Case(rope_append_codes, "few-pairs-k2v2", lambda: in_pairs(rope_appended, [21, 9], [2, 1], (4, 2), 64, bits=(2, 2))),
]


@pytest.fixture(autouse=True)
def _poison_unwritten_memory():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def _sound_interpreter(monkeypatch: pytest.MonkeyPatch):
    """Repair Triton 3.6's interpreter: float32 is rounded to bfloat16, not cut off; matrices of bfloat16 are not multiplied as
    integers; and numpy 2.4 makes a number of an array only by item(), as loops to a computed bound need. The
    language's functions are exchanged once for a launch, not again for every function that a kernel calls."""
    from triton.runtime import interpreter

    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot
    patch, patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
    exchanged: set[frozenset[str]] = set()  # in this launch: the parts of the language that a module sees

    def converted(values, source, target, mode):
        if (source.name, target.name) == ("fp32", "bf16"):
            bits = np.ascontiguousarray(values).view(np.uint32)
            nearest = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
            return np.where(np.isnan(values), np.uint16(0x7FC0), nearest)
        if (source.name, target.name) == ("bf16", "fp32"):
            return values.view(np.uint16).astype(np.uint32) << 16
        return convert(values, source, target, mode)

    def product(self, a, b, *rest):
        wide = [self.cast_impl(x, interpreter.tl.float32) if x.dtype.scalar.name == "bf16" else x for x in (a, b)]
        return dot(self, *wide, *rest)

    def patched(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    @cache
    def parts(function):
        seen = {name: value for name, value in function.__globals__.items() if inspect.ismodule(value)}
        return frozenset(value.__name__ for value in seen.values() if value in (interpreter.tl, interpreter.tl.core))

    def patched_once(function):
        scope = interpreter._LangPatchScope()
        if parts(function) not in exchanged:
            exchanged.add(parts(function))
            scope = patch(function)
            restore = scope.restore
            # only a launch restores what it exchanged, at its end
            scope.restore = lambda: (restore(), exchanged.clear())
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang", patched_once)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(interpreter, "_convert_float", converted)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", product)


def small(case: Case) -> bool:
    # a contract of its own is the CPU's: where both are listed, the kernel is the same here
    return not case.bench and not case.slow and case.id.removesuffix("-fast") not in NAMES - {case.id}


def interpreted_cases() -> list:
    """Return a few cases of every op, spread over its list; the others are marked slow."""
    found = []
    for name in dict.fromkeys(case.op.name for case in CASES):
        mine = [case for case in CASES if case.op.name == name and small(case)]
        sampled = {LONG.get(case.id, case.id) for case in mine[:: max(1, -(-len(mine) // MOST_CASES))]}
        mine += [case for case in FEW_ROWS if case.op.name == name]
        found += [pytest.param(case, id=case.id, marks=[] if case.id in sampled else [pytest.mark.slow]) for case in mine]
    return found


def test_named_cases_exist():
    assert {*LONG, *LONG.values()} <= {*NAMES, *(case.id for case in FEW_ROWS)}


def hold(case: Case, device: str) -> None:
    if case.op.kernel("cuda") is None:
        pytest.skip("no cuda kernel: the reference serves this op")
    found = compare(case, "cuda", partial(moved, device=device))
    if found.declined is not None:
        pytest.skip(f"declined: {found.declined}")
    assert found.error <= case.tol, f"{found.where}: relative RMS {found.error:.3g} over {case.tol:g}"


# numpy computes masked lanes too, and warns of what it finds there
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("_sound_interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled for the GPU here")
@pytest.mark.parametrize("case", interpreted_cases())
def test_interpreted_kernel_matches_reference(case: Case):
    if sum(tensor.nbytes for _, tensor in tensors(case.args())) > LARGEST_NBYTES:
        pytest.skip("too large for the interpreter")
    with np.errstate(all="ignore"):
        hold(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.id, marks=[pytest.mark.slow] if case.slow else []) for case in CASES]
)
def test_kernel_on_the_gpu_matches_reference(case: Case):
    hold(case, "cuda")


def test_row_order_reaches_nested_weights():
    for case in CASES:
        if case.id in ("linears-mixed-bits", "gate_up_swiglu-many-tokens"):
            args = in_row_layout(case.args())
            weights = args.get("weights") or (args["gate"], args["up"])
            assert [weight.lanes for weight in weights] == [1] * len(weights)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("_sound_interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled for the GPU here")
def test_uninitialised_memory_changes_no_bit(monkeypatch: pytest.MonkeyPatch):
    """Attention sums in another order where it finds NaN, so that it must not read uninitialised memory."""
    # the recent window begins in the middle of a page
    args = attend([100], [1], (4, 2), 64, page=64, calibrated=True, full_precision=(1, 32))
    found, empty = [], torch.empty
    for filling in (0.0, float("nan")):

        def filled(*sizes: Any, value: float = filling, **options: Any) -> torch.Tensor:
            made = empty(*sizes, **options)
            return made.fill_(value) if made.is_floating_point() else made

        monkeypatch.setattr(torch, "empty", filled)
        with np.errstate(all="ignore"):
            found.append(turboquant_attention.kernel("cuda")(**args))
    assert torch.equal(*found)
