"""The op of adapters: other backends than the one of this machine, and bad input."""

import pytest
import torch

from auraflux.errors import InputError
from auraflux.ops import add_lora, invariant
from auraflux.ops._dispatch import Declined
from auraflux.ops.lora import cuda
from auraflux.ops.lora.cases import CASES, adapted


@pytest.mark.parametrize("case", [case for case in CASES if not case.bench], ids=lambda case: case.id)
def test_the_products_of_a_gpu_match_the_reference(case):
    found, expected = case.args(), case.args()
    cuda.add_lora(**found)
    add_lora.reference(**expected)
    difference, scale = (found["y"] - expected["y"]).float().norm(), expected["y"].float().norm()
    assert difference <= 1e-2 * scale


def test_products_of_a_gpu_are_not_batch_invariant():
    with invariant(), pytest.raises(Declined):
        cuda.add_lora(**adapted(2, 64, 32))


def test_another_adapter_with_infinities_changes_nothing():
    args = adapted(3, 64, 32)
    args["slots"] = torch.tensor([0, -1, 0], dtype=torch.int32)
    args["a"][1] = torch.inf
    before = args["y"].clone()
    add_lora.reference(**args)
    assert args["y"].isfinite().all()
    assert torch.equal(args["y"][1], before[1])


@pytest.mark.parametrize("change", [{"b": torch.zeros(3, 16, 31)}, {"slots": torch.zeros(4, dtype=torch.int64)}])
def test_bad_shapes_and_dtypes_are_refused(change):
    with pytest.raises(InputError):
        add_lora(**{**adapted(4, 64, 32), **change})
