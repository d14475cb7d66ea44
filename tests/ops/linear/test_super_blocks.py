"""Products with GGUF super-blocks are bit-identical to those with the scales and biases they encode."""

from typing import Any

import pytest
import torch

from auraflux.ops import Experts, embed, expert_mlp, gate_up_swiglu, linear, linears, use_backend
from auraflux.ops._dispatch import exact
from auraflux.ops.linear.cpu.forms import BLOCK, Form
from auraflux.ops.linear.cpu.products import driver
from auraflux.ops.moe.experts import blob_of
from auraflux.ops.simd.isa import ISA
from auraflux.quant import QTensor
from auraflux.quant.super_blocks import FORMATS
from tests.ops.quick import some

# q5_k has the steps of q4_k, q3_k those of q6_k, and products of their bits are in test_parity.py
KINDS = some(FORMATS, set(FORMATS) - {"q3_k", "q5_k"})


# FP8 without NaN, of either sign
NUMBERS = 0xFEFEFEFE - 2**32


def weight(kind: str, rows: int, width: int, lanes: int = ISA.lanes) -> QTensor:
    """Return random codes and steps, with scales of ordinary size."""
    form, blocks = FORMATS[kind], width // 256
    packed = torch.randint(-(2**31), 2**31, (rows, width * form.bits // 32), dtype=torch.int32)
    steps = torch.randint(-(2**31), 2**31, (rows, blocks, form.words - 1), dtype=torch.int32)
    if form.has_floats:
        steps &= NUMBERS
    ends = (torch.rand(rows, blocks, 2) + 0.1) * 0.01 * torch.tensor([1.0, -1.0])
    first = ends.half().view(torch.int32) if form.has_biases else ends[..., :1].half().float().view(torch.int32)
    words = torch.cat([first, steps], -1).flatten(1)
    return QTensor(packed, words, None, form.bits, form.group, (rows, width)).interleave(lanes)


# exact products compile for seconds: of their formats one with biases and one without are quick
QUICK_EXACT = {"q4_k", "q6_k"}


EXPERTS = [("q4_k", "q4_k", "q6_k"), ("q2_k", "q2_k", "q6_k"), ("iq4_xs", "q4_k", "iq4_xs"), ("q3_k", "q5_k", "iq4_xs")]


@pytest.mark.parametrize("lanes", [1, ISA.lanes])
@pytest.mark.parametrize("kind", KINDS)
def test_fast_products_are_the_same_bits(kind: str, lanes: int):
    hold_products(kind, lanes, on=False)


@pytest.mark.parametrize("lanes", [1, ISA.lanes])
@pytest.mark.parametrize("kind", some(FORMATS, QUICK_EXACT))
def test_exact_products_are_the_same_bits(kind: str, lanes: int):
    hold_products(kind, lanes, on=True)


def hold_products(kind: str, lanes: int, on: bool) -> None:
    w = weight(kind, 2 * BLOCK + 3, 512, lanes)
    for tokens in (1, 6, 16, 37):
        x = torch.randn(tokens, 512) * 10.0 ** torch.randint(-3, 3, (tokens, 1))
        with exact(on):
            found, wanted = linear(x, w), linear(x, w.expand_scales())
        assert torch.equal(found, wanted)
        with use_backend("reference"):
            near = linear(x, w)
        assert (found - near).norm() <= (1e-5 if on else 0.03) * near.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_nothing_and_the_largest_are_the_same_bits(kind: str):
    w = weight(kind, BLOCK, 256)
    words = w.scales.view(1, FORMATS[kind].words, BLOCK)
    words[:, 1:, 0], words[:, 1:, 1] = 0, NUMBERS if FORMATS[kind].has_floats else -1
    # both ends of half precision
    words[:, 0, 2:4] = 0x0001_0001 if FORMATS[kind].has_biases else 0x33800000
    x = torch.randn(3, 256)
    assert torch.equal(linear(x, w), linear(x, w.expand_scales()))
    words[:, 0, 2:4] = 0x7BFF_7BFF if FORMATS[kind].has_biases else 0x477FE000
    assert torch.equal(linear(x, w), linear(x, w.expand_scales()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_is_no_number_spoils_its_row_alone(kind: str):
    w = weight(kind, BLOCK, 256)
    w.scales.view(1, FORMATS[kind].words, BLOCK)[:, 0, 1] = 0x7E00_7E00 if FORMATS[kind].has_biases else 0x7FC00000
    for tokens in (1, 20):
        bad = linear(torch.randn(tokens, 256), w).isnan()
        assert bad[:, 1].all()
        assert not bad[:, torch.arange(BLOCK) != 1].any()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("lanes", [1, ISA.lanes])
def test_rows_of_a_table_are_the_same_bits(kind: str, lanes: int):
    table, ids = weight(kind, 21, 512, lanes), torch.tensor([0, 20, 7, 7])
    assert torch.equal(embed(ids, table), embed(ids, table.expand_scales()))
    assert torch.equal(embed(ids, table), table.dequantize(torch.float32)[ids])


def test_several_weights_in_one_list():
    x, (gate, up) = torch.randn(2, 512), (weight("q4_k", 24, 512) for _ in range(2))
    plain = gate.expand_scales(), up.expand_scales()
    assert torch.equal(gate_up_swiglu(x, gate, up), gate_up_swiglu(x, *plain))
    others = gate, weight("q6_k", 9, 512), up.expand_scales()
    for found, wanted in zip(linears(x, others), linears(x, [each.expand_scales() for each in others]), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("kinds", some(EXPERTS, EXPERTS[:3]))
@pytest.mark.parametrize("tokens", [1, 40])
def test_experts_in_blobs_are_the_same_bits(kinds: tuple[str, ...], tokens: int):
    count, hidden, inner = 3, 256, 512
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    each = [
        {name: weight(kind, *shape) for kind, (name, shape) in zip(kinds, shapes.items(), strict=True)} for _ in range(count)
    ]
    blobs = torch.stack([blob_of(one) for one in each])
    like = {name: one.to("meta") for name, one in each[0].items()}
    plain: dict[str, Any] = {}
    for name in shapes:
        wide = [one[name].expand_scales() for one in each]
        stacked = wide[0].empty_stack(count)
        for part in ("packed", "scales", "biases"):
            for number, one in enumerate(wide):
                if (array := getattr(one, part)) is not None:
                    getattr(stacked, part)[number] = array
        plain[name] = stacked
    x, ids = torch.randn(tokens, hidden), torch.randint(0, count, (tokens, 2), dtype=torch.int32)
    weights = torch.rand(tokens, 2)
    found = expert_mlp(x, ids, weights, Experts.from_blobs(blobs, like))
    assert torch.equal(found, expert_mlp(x, ids, weights, Experts(**plain)))


def test_a_kernel_is_compiled_for_words():
    form = driver(8, 4, 32, "q4_k").form
    assert form == Form(8, 4, 32, "f32", 5)
    assert Form.parse(form.text) == form
    assert driver(8, 4, 32, "iq4_xs").form == Form(8, 4, 32, "iq4", 3)
