"""Inside `invariant` a row on a GPU is bit-identical to the row alone, and matches the reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from auraflux.errors import InputError
from auraflux.ops import invariant, linear, lora_gate_up, lora_linears
from auraflux.ops._cases import Case, all_cases, tensors
from auraflux.ops._dispatch import Declined, all_ops
from auraflux.ops.fake_gpu import use_fake_gpu
from auraflux.ops.gpu_cases import CASES
from auraflux.ops.routes import explain_call, routes_of
from auraflux.quant import quantize
from tests.ops.gpu.test_cuda import _sound_interpreter, hold  # noqa: F401
from tests.ops.test_invariance import OTHERS, ROWS, SEQUENCE_OPS, parted

# whose results are not tokens', or that are not part of a model's step
EXCLUDED = {"sample", "penalize", "decode", "encode", "merge_partials"}
SERVED_CASES = [case for case in all_cases() if case.op.name in {*ROWS, *SEQUENCE_OPS} - OTHERS - EXCLUDED]
MOST_CASES = 5  # of an op in the quick tests
# what kernels for any number of tokens leave of bf16: they round weights of most formats (0.2 to 0.4 % of 64 results), and what
# is between two products, where the reference rounds at other places (0.3 to 0.4 %)
ROUNDED = 6e-3


def params(cases: list[Case]) -> list:
    """Return a few cases of every op, spread over its list; the others are marked slow."""
    found = []
    for name in dict.fromkeys(case.op.name for case in cases):
        mine = [case for case in cases if case.op.name == name]
        sampled = {case.id for case in mine[:: max(1, -(-len(mine) // MOST_CASES))] if not case.slow}
        found += [pytest.param(case, id=case.id, marks=[] if case.id in sampled else [pytest.mark.slow]) for case in mine]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*(pytest.param(case, id=f"{case.id}-large") for case in CASES), *params(SERVED_CASES)])
def test_a_row_is_what_it_is_alone(case: Case):
    if case.op.kernel("cuda") is None:
        pytest.skip("no cuda kernel")
    with invariant():
        assert parted(case, "cuda") is None


@pytest.mark.gpu
@pytest.mark.parametrize("case", params([case for case in SERVED_CASES if case.op.name not in ("route", "mixture")]))
def test_a_row_is_what_the_reference_says(case: Case):
    in_bf16 = any(tensor.dtype is torch.bfloat16 for _, tensor in tensors(case.args()))
    with invariant():
        hold(replace(case, tol=max(case.tol, ROUNDED)) if in_bf16 else case, "cuda")


# small enough for the interpreter, by name: to make every case's tensors and count their bytes takes seconds
INTERPRETED = (
    *("linear-2bit-g64-1", "linear-q6k-1", "linear-bf16-one-token", "linear-dense-f32"),
    *("gated_delta_prefill-narrow", "gated_delta_step-own-keys", "gated_delta_step-narrow"),
    *("expert_mlp-one-token-exact", "expert_mlp-limited"),
)
INTERPRETED_SLOW = ("gated_delta_prefill-own-keys", "expert_mlp-many-q3k")


def interpreted() -> list:
    named = {case.id: case for case in SERVED_CASES}
    quick = [pytest.param(named[name], id=name) for name in INTERPRETED]
    return quick + [pytest.param(named[name], id=name, marks=pytest.mark.slow) for name in INTERPRETED_SLOW]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("_sound_interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled for the GPU here")
@pytest.mark.parametrize("case", interpreted())
def test_interpreted_kernels_match_their_references(case: Case):
    with invariant(), np.errstate(all="ignore"):
        hold(case, "cpu")


def test_every_table_says_which_routes_are_batch_invariant():
    # adapters are refused with --invariant
    tables = [routes_of(op, "cuda") for op in all_ops() if op not in (lora_linears, lora_gate_up)]
    assert not [table for table in tables if table is not None and not any(route.invariant for route in table)]


def test_choices_do_not_depend_on_the_number_of_tokens():
    weight = quantize(torch.randn(256, 512, dtype=torch.bfloat16), 8, 64)
    for tokens in (1, 2, 20, 200, 2000):
        args = {"x": torch.zeros(tokens, 512, dtype=torch.bfloat16), "weight": weight}
        with use_fake_gpu(), invariant():
            found = explain_call(linear, "cuda", args)
        assert found is not None
        assert found.taken == "gemm_invariant"
        with use_fake_gpu():
            assert explain_call(linear, "cuda", args) != found


def test_unsupported_calls_are_refused():
    from auraflux.ops import compress_windows

    with invariant(), pytest.raises(InputError, match="Run without --invariant"):
        compress_windows._refuse_invariant("cuda", "it has no kernel")


def test_partial_attention_is_declined():
    case = next(case for case in SERVED_CASES if case.id == "attention_partials-everything")
    kernel = case.op.kernel("cuda")
    assert kernel is not None
    with invariant(), pytest.raises(Declined, match="depends on the number of tokens"):
        kernel(**case.args())
