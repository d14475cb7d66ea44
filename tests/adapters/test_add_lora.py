"""The ops of adapters: one call equals its parts, another adapter's numbers do not matter, and bad input is refused."""

from dataclasses import replace

import pytest
import torch

from auraflux.errors import InputError
from auraflux.ops import (
    Adapters,
    LinearInput,
    add_lora,
    add_norm_linears,
    add_rms_norm,
    invariant,
    lora_gate_up,
    lora_linears,
    swiglu,
)
from auraflux.ops._dispatch import Declined
from auraflux.ops.lora import cuda
from auraflux.ops.lora.cases import adapted, gated, products


def test_one_call_equals_a_norm_and_a_call_for_each_weight():
    args = adapted(5, 96, (40, 33), (16, 3), norm=True, delta=True)
    inputs, adapters, apart = args["inputs"], args["adapters"], [y.clone() for y in args["ys"]]
    add_lora(**args)
    h, _ = add_rms_norm(inputs.delta, inputs.x, inputs.norm, inputs.eps)
    for y, a, b in zip(apart, adapters.a, adapters.b, strict=True):
        add_lora(LinearInput(h), [y], Adapters(adapters.slots, [a], [b]))
    for found, expected in zip(args["ys"], apart, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_rows_have_the_matrices_of_their_own_adapter():
    args = adapted(4, 64, (32,))
    adapters = args["adapters"] = replace(args["adapters"], slots=torch.tensor([2, -1, 0, 3], dtype=torch.int32))
    before, ((a, b),) = args["ys"][0].clone(), adapters.pairs
    add_lora(**args)
    for row, slot in enumerate([2, None, 0, None]):
        change = 0 if slot is None else args["inputs"].x[row] @ a[slot].T @ b[slot]
        torch.testing.assert_close(args["ys"][0][row], before[row] + change, rtol=1e-4, atol=1e-4)


def test_products_are_those_of_the_weights_with_what_the_adapters_add():
    args = products(5, 96, (40, 33), (16, 0), norm=True, delta=True)
    inputs, weights, adapters = args["inputs"], args["weights"], args["adapters"]
    total, found = lora_linears(**args)
    wanted_total, wanted = add_norm_linears(inputs.x, inputs.delta, inputs.norm, inputs.eps, weights)
    torch.testing.assert_close(found[1], wanted[1])
    add_lora(inputs, wanted, adapters)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(total, wanted_total)


def test_gate_and_up_are_two_products():
    args = gated(3, 64, 32)
    _, found = lora_gate_up(**args)
    _, both = lora_linears(args["inputs"], (args["gate"], args["up"]), args["adapters"])
    torch.testing.assert_close(found, swiglu(*both))


@pytest.mark.parametrize("tokens", [2, 65])
def test_products_of_a_gpu_are_not_batch_invariant(tokens: int):
    with invariant(), pytest.raises(Declined):
        cuda.add_lora(**adapted(tokens, 64, (32,)))


def test_another_adapter_with_infinities_changes_nothing():
    args = adapted(3, 64, (32,))
    args["adapters"] = replace(args["adapters"], slots=torch.tensor([0, -1, 0], dtype=torch.int32))
    args["adapters"].a[0][1] = torch.inf
    before = args["ys"][0].clone()
    add_lora.reference(**args)
    assert args["ys"][0].isfinite().all()
    assert torch.equal(args["ys"][0][1], before[1])


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("adapters", {"b": [torch.zeros(3, 16, 31)]}, "'b'"),
        ("adapters", {"b": [None]}, "belong together"),
        ("adapters", {"slots": torch.zeros(4, dtype=torch.int64)}, "'slots'"),
        ("adapters", {"a": []}, "0 matrices a"),
        ("inputs", {"delta": torch.zeros(4, 64)}, "'delta' is given without 'norm'"),
        ("inputs", {"norm": torch.ones(63)}, "63"),
    ],
)
def test_bad_shapes_and_dtypes_are_refused(field, change, message):
    args = adapted(4, 64, (32,))
    with pytest.raises(InputError, match=message):
        add_lora(**args | {field: replace(args[field], **change)})


def test_gate_and_up_have_one_shape_and_two_adapters():
    args = gated(4, 64, 32)
    with pytest.raises(InputError, match="must be equal"):
        lora_gate_up(**{**args, "up": torch.zeros(31, 64)})
    one = Adapters(args["adapters"].slots, args["adapters"].a[:1], args["adapters"].b[:1])
    with pytest.raises(InputError, match="2 products, 1 matrices a"):
        lora_gate_up(**{**args, "adapters": one})
