"""The kernels that lay out weights against the torch and numpy code that defines the layouts, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from auraflux.ops.layout import gguf
from auraflux.ops.layout.blocks import SPLITS
from auraflux.ops.layout.gguf import convert_rows
from auraflux.ops.layout.rows import interleave
from auraflux.ops.simd.isa import ISA
from auraflux.quant import QTensor, quantize
from auraflux.quant.gguf_blocks import from_blocks
from auraflux.quant.gguf_layouts import LAYOUTS
from auraflux.quant.super_blocks import FORMATS
from tests.quant.test_gguf_blocks import random_blocks

# each compiles a kernel: one type of every kind of scales, and those of the usual files
QUICK = {("Q4_1", 16, False), ("Q8_0", 16, False), ("Q4_K", 16, True), ("Q6_K", 16, False), ("Q5_K", 1, False)}
VARIANTS = [
    (kind, lanes, expands)
    for kind in SPLITS
    for lanes in (16, 1)
    for expands in (False, True)
    if not expands or kind.lower() in FORMATS
]


def params() -> list[object]:
    return [
        pytest.param(*each, id=" ".join(map(str, each)), marks=[] if each in QUICK else pytest.mark.slow) for each in VARIANTS
    ]


def assert_same(found: QTensor | None, wanted: QTensor) -> None:
    assert found is not None
    assert (found.kind, found.bits, found.group, found.shape, found.lanes) == (
        wanted.kind,
        wanted.bits,
        wanted.group,
        wanted.shape,
        wanted.lanes,
    )
    for name in ("packed", "scales", "biases"):
        mine, theirs = getattr(found, name), getattr(wanted, name)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.dtype == theirs.dtype
            assert mine.shape == theirs.shape
            assert torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)), name


def reference(octets: np.ndarray, kind: str, lanes: int, expands: bool, order: torch.Tensor | None = None) -> QTensor:
    found = from_blocks(octets, kind)
    found = found if order is None else found.take(order)
    found = found.expand_scales() if expands else found
    return found if lanes == 1 else found.interleave(lanes)


@pytest.mark.parametrize(("kind", "lanes", "expands"), params())
def test_blocks_are_converted_to_the_same_bits(kind: str, lanes: int, expands: bool):
    lanes = min(lanes, ISA.lanes)
    awkward = np.array([2**-24, -(2**-15), 1023 * 2**-24, 0, -0.0, 500, -500], np.float16)
    for rows in (1, 16, 37):
        octets = random_blocks(kind, rows)
        blocks = octets.reshape(-1).view(LAYOUTS[kind].record)
        for name in {"scale", "least"} & set(blocks.dtype.names or ()) if kind != "MXFP4" else ():
            blocks[name][: len(awkward)] = awkward[: len(blocks)]
        assert_same(convert_rows(octets, kind, lanes, expands), reference(octets, kind, lanes, expands))
        if lanes > 1:
            order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
            found = convert_rows(octets, kind, lanes, expands, order)
            assert_same(found, reference(octets, kind, lanes, expands, order))


def test_a_stack_and_many_rows():
    octets = random_blocks("Q8_0", 3, 700)
    found = convert_rows(octets, "Q8_0", ISA.lanes)
    assert found is None, "a stack has its rows in order"
    assert_same(convert_rows(octets, "Q8_0"), from_blocks(octets, "Q8_0"))
    assert_same(convert_rows(octets[1], "Q8_0", ISA.lanes), from_blocks(octets[1], "Q8_0").interleave(ISA.lanes))


@pytest.mark.parametrize(("kind", "lanes"), [("Q4_K", ISA.lanes), ("Q8_0", ISA.lanes), ("Q6_K", 1), ("Q4_1", 1)])
def test_rows_are_converted_in_steps(monkeypatch: pytest.MonkeyPatch, kind: str, lanes: int):
    octets, done = random_blocks(kind, 61), []
    monkeypatch.setattr(gguf, "STEP_NBYTES", octets.nbytes // 3)
    found = convert_rows(octets, kind, lanes, done=lambda first, last: done.append((first, last)))
    assert_same(found, reference(octets, kind, lanes, expands=False))
    starts, ends = zip(*done, strict=True)
    assert len(done) > 2
    assert [*starts, octets.nbytes] == [0, *ends]


@pytest.mark.parametrize("scale", [1000.0, np.inf, np.nan])
def test_a_bias_too_large_for_half_precision_is_left_to_the_reference(scale: float):
    octets = random_blocks("Q8_0", 37)
    octets.reshape(-1).view(LAYOUTS["Q8_0"].record)["scale"][5] = scale
    assert convert_rows(octets, "Q8_0", ISA.lanes) is None


def test_an_order_that_is_no_permutation_is_refused():
    octets = random_blocks("Q8_0", 5)
    for order in ([0, 1, 2, 3, 5], [-1, 0, 1, 2, 3], [0, 0, 1, 2, 3], [0, 1, 2, 3]):
        assert convert_rows(octets, "Q8_0", ISA.lanes, order=torch.tensor(order)) is None


def test_other_types_and_damaged_rows_are_refused():
    octets = random_blocks("Q8_0", 5)
    assert convert_rows(octets, "IQ3_S", ISA.lanes) is None
    assert convert_rows(octets[:, :-1], "Q8_0", ISA.lanes) is None
    assert convert_rows(octets[:0], "Q8_0", ISA.lanes) is None
    assert convert_rows(octets, "Q8_0", 3) is None


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("shape", [(1, 64), (16, 32), (37, 96), (3, 33, 160), (2, 32, 640)], ids=str)
def test_rows_are_interleaved_to_the_same_bits(bits: int, shape: tuple[int, ...]):
    torch.manual_seed(bits)
    for dtype in (torch.float32, torch.bfloat16):
        weight = quantize(torch.randn(shape).to(dtype), bits, 32)
        assert_same(interleave(weight, ISA.lanes), weight.interleave(ISA.lanes))


def test_other_weights_are_interleaved_too():
    weight = quantize(torch.randn(37, 96), kind="mxfp4")
    assert_same(interleave(weight, ISA.lanes), weight.interleave(ISA.lanes))
    # rows of a fused stack are far apart
    stack = quantize(torch.randn(3, 64, 96), 4, 32)
    part = stack.part(slice(1, None, 2))
    assert_same(interleave(part, ISA.lanes), part.interleave(ISA.lanes))
    interleaved = weight.interleave(2)
    assert_same(interleave(interleaved, ISA.lanes), weight.interleave(ISA.lanes))
    assert interleave(replace(weight), 1).lanes == 1
