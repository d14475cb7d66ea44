"""GGUF super-blocks: kinds, sizes and slices."""

import pytest
import torch

from auraflux.errors import FormatError
from auraflux.quant import QTensor, quantize
from auraflux.quant.gguf_blocks import from_blocks
from auraflux.quant.super_blocks import FORMATS
from tests.quant.test_gguf_blocks import WIDTH, random_blocks

BITS = {"q2_k": 2.625, "q3_k": 3.625, "q4_k": 4.625, "q5_k": 5.625, "q6_k": 6.625, "iq4_xs": 4.375, "nvfp4_e4m3": 4.625}


def made(kind: str, *leading: int) -> QTensor:
    name = kind.removesuffix("_e4m3").upper()
    return from_blocks(random_blocks(name, *leading), name)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_weight_has_the_size_of_its_blocks(kind: str):
    found = made(kind, 7)
    assert found.kind == kind
    assert found.biases is None
    assert found.nbytes * 8 == BITS[kind] * 7 * WIDTH
    expanded = found.expand_scales()
    assert expanded.kind == FORMATS[kind].expanded
    assert expanded.super_block is None
    assert expanded.expand_scales() is expanded
    assert torch.equal(expanded.dequantize(torch.float32), found.dequantize(torch.float32))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_interleaved_rows_hold_the_same_weight(kind: str, lanes: int):
    found = made(kind, 21)
    interleaved = found.interleave(lanes)
    assert (interleaved.kind, interleaved.rows().kind) == (kind, kind)
    assert torch.equal(interleaved.rows().scales, found.scales)
    wanted = found.dequantize(torch.float32)
    assert torch.equal(interleaved.dequantize(torch.float32), wanted)
    assert torch.equal(interleaved.expand_scales().rows().dequantize(torch.float32), wanted)
    ids = torch.tensor([20, 3, 3])
    assert torch.equal(interleaved.take(ids).dequantize(torch.float32), wanted[ids])


@pytest.mark.parametrize("kind", FORMATS)
def test_super_blocks_are_expanded_only_where_they_are_split(kind: str):
    found = made(kind, 5)
    wanted = found.dequantize(torch.float32)
    for columns, expected in ((range(256, 512), kind), (range(128, 384), FORMATS[kind].expanded)):
        part = found.columns(columns)
        assert part.kind == expected
        assert torch.equal(part.dequantize(torch.float32), wanted[:, columns.start : columns.stop])
    order = torch.tensor([1, 0])
    assert found.permute_columns(order, 256).kind == kind
    assert torch.equal(found.permute_columns(order, 256).dequantize(torch.float32), wanted.view(5, 2, 256)[:, order].flatten(1))


@pytest.mark.parametrize("kind", FORMATS)
def test_one_of_a_stack(kind: str):
    stack = made(kind, 3, 5)
    assert stack[1].kind == stack.flatten_stack().kind == stack.part(slice(1, 3)).kind == kind
    assert torch.equal(stack[1].dequantize(torch.float32), stack.dequantize(torch.float32)[1])


def test_invalid_super_blocks_are_refused():
    found = made("q4_k", 5)
    with pytest.raises(FormatError, match=r"scales have shape \[5, 9\]; \[5, 10\] is needed"):
        QTensor(found.packed, found.scales[:, :9], None, 4, 32, (5, WIDTH))
    with pytest.raises(FormatError, match="cannot be stored in super-blocks of 256"):
        QTensor(found.packed[:, :16], found.scales[:, :2], None, 4, 32, (5, 128))
    with pytest.raises(FormatError, match="Q4_K cannot be quantized to: it is read from GGUF files only"):
        quantize(torch.randn(4, 256), 4, 32, "q4_k")
