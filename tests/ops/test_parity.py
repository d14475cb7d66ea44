"""Every op, every case, every backend on this machine: results and arguments after the call agree with the reference."""

import pytest
import torch

from auraflux.ops._cases import Case, all_cases, compare
from auraflux.ops._dispatch import all_ops
from tests.ops.quick import LARGE, params

CASES = all_cases()


@pytest.fixture(autouse=True)
def _poison_unwritten_memory():
    # torch.empty is filled with NaN, so an output a kernel forgets to write is caught
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("case", params(CASES))
def test_cpu_kernel_matches_reference(case: Case):
    if case.op.kernel("cpu") is None:
        pytest.skip("no cpu kernel: the reference serves this op")
    found = compare(case, "cpu")
    if found.declined is not None:
        pytest.skip(f"declined: {found.declined}")
    assert found.error <= case.tol, f"{found.where}: relative RMS {found.error:.3g} over {case.tol:g}"


def test_every_op_has_cases():
    assert {op.name for op in all_ops()} == {case.op.name for case in CASES if not case.slow and not case.bench}


def test_case_names_are_unique():
    names = [case.id for case in CASES]
    assert sorted(names) == sorted(set(names))
    assert set(names) >= LARGE
