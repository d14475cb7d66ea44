"""The op of adapters: one call equals its parts, another adapter's numbers do not matter, and bad input is refused."""

import pytest
import torch

from auraflux.errors import InputError
from auraflux.ops import add_lora, add_lora_swiglu, add_rms_norm, invariant, swiglu
from auraflux.ops._dispatch import Declined
from auraflux.ops.lora import cuda
from auraflux.ops.lora.cases import adapted, gated


def test_one_call_equals_a_norm_and_a_call_for_each_weight():
    together, apart = (adapted(5, 96, (40, 33), (16, 3), norm=True, delta=True) for _ in range(2))
    apart = {name: together[name] for name in together} | {"ys": [y.clone() for y in together["ys"]]}
    add_lora(**together)
    h, _ = add_rms_norm(apart["delta"], apart["x"], apart["norm"], apart["eps"])
    for y, a, b in zip(apart["ys"], apart["a"], apart["b"], strict=True):
        add_lora(h, [y], apart["slots"], [a], [b])
    for found, expected in zip(together["ys"], apart["ys"], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_rows_have_the_matrices_of_their_own_adapter():
    args = adapted(4, 64, (32,))
    args["slots"] = torch.tensor([2, -1, 0, 3], dtype=torch.int32)
    before, (a,), (b,) = args["ys"][0].clone(), args["a"], args["b"]
    add_lora(**args)
    for row, slot in enumerate([2, None, 0, None]):
        change = 0 if slot is None else args["x"][row] @ a[slot].T @ b[slot]
        torch.testing.assert_close(args["ys"][0][row], before[row] + change, rtol=1e-4, atol=1e-4)


def test_gate_and_up_are_those_of_add_lora():
    args = gated(3, 64, 32)
    gate, up = args["gate"].clone(), args["up"].clone()
    found = add_lora_swiglu(**args)
    add_lora(args["x"], [gate, up], args["slots"], args["a"], args["b"])
    torch.testing.assert_close(found, swiglu(gate, up))


@pytest.mark.parametrize("tokens", [2, 65])
def test_products_of_a_gpu_are_not_batch_invariant(tokens: int):
    with invariant(), pytest.raises(Declined):
        cuda.add_lora(**adapted(tokens, 64, (32,)))


def test_another_adapter_with_infinities_changes_nothing():
    args = adapted(3, 64, (32,))
    args["slots"] = torch.tensor([0, -1, 0], dtype=torch.int32)
    args["a"][0][1] = torch.inf
    before = args["ys"][0].clone()
    add_lora.reference(**args)
    assert args["ys"][0].isfinite().all()
    assert torch.equal(args["ys"][0][1], before[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": [torch.zeros(3, 16, 31)]}, "'b'"),
        ({"slots": torch.zeros(4, dtype=torch.int64)}, "'slots'"),
        ({"a": []}, "0 matrices a"),
        ({"delta": torch.zeros(4, 64)}, "'delta' is given without 'norm'"),
        ({"norm": torch.ones(63)}, "63"),
    ],
)
def test_bad_shapes_and_dtypes_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        add_lora(**{**adapted(4, 64, (32,)), **change})


def test_gate_and_up_need_two_matrices_and_one_shape():
    args = gated(4, 64, 32)
    with pytest.raises(InputError, match="gate and up need two"):
        add_lora_swiglu(**{**args, "a": args["a"][:1]})
    with pytest.raises(InputError, match="they must be equal"):
        add_lora_swiglu(**{**args, "up": torch.zeros(4, 31)})
