"""Super-blocks of GGUF: what they are called, how large they are, and what is cut out of them."""

import pytest
import torch

from auraflux.errors import FormatError
from auraflux.quant import QTensor, quantize
from auraflux.quant.gguf_blocks import from_blocks
from auraflux.quant.super_blocks import FORMATS
from tests.quant.test_gguf_blocks import WIDTH, random_blocks

BITS = {"q2_k": 2.625, "q3_k": 3.625, "q4_k": 4.625, "q5_k": 5.625, "q6_k": 6.625, "iq4_xs": 4.375}


def made(kind: str, *leading: int) -> QTensor:
    return from_blocks(random_blocks(kind.upper(), *leading), kind.upper())


@pytest.mark.parametrize("kind", FORMATS)
def test_a_weight_takes_what_its_blocks_take(kind: str):
    found = made(kind, 7)
    assert found.kind == kind
    assert found.biases is None
    assert found.nbytes * 8 == BITS[kind] * 7 * WIDTH
    plain = found.widened()
    assert plain.kind == FORMATS[kind].plain
    assert plain.super_block is None
    assert plain.widened() is plain
    assert torch.equal(plain.dequantize(torch.float32), found.dequantize(torch.float32))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_rows_side_by_side_are_the_same_rows(kind: str, lanes: int):
    found = made(kind, 21)
    turned = found.interleave(lanes)
    assert (turned.kind, turned.rows().kind) == (kind, kind)
    assert torch.equal(turned.rows().scales, found.scales)
    wanted = found.dequantize(torch.float32)
    assert torch.equal(turned.dequantize(torch.float32), wanted)
    assert torch.equal(turned.widened().rows().dequantize(torch.float32), wanted)
    ids = torch.tensor([20, 3, 3])
    assert torch.equal(turned.take(ids).dequantize(torch.float32), wanted[ids])


@pytest.mark.parametrize("kind", FORMATS)
def test_super_blocks_are_cut_only_where_they_must_be(kind: str):
    found = made(kind, 5)
    wanted = found.dequantize(torch.float32)
    for columns, kept in ((range(256, 512), kind), (range(128, 384), FORMATS[kind].plain)):
        part = found.columns(columns)
        assert part.kind == kept
        assert torch.equal(part.dequantize(torch.float32), wanted[:, columns.start : columns.stop])
    order = torch.tensor([1, 0])
    assert found.moved(order, 256).kind == kind
    assert torch.equal(found.moved(order, 256).dequantize(torch.float32), wanted.view(5, 2, 256)[:, order].flatten(1))


@pytest.mark.parametrize("kind", FORMATS)
def test_one_of_a_stack(kind: str):
    stack = made(kind, 3, 5)
    assert stack[1].kind == stack.joined().kind == stack.part(slice(1, 3)).kind == kind
    assert torch.equal(stack[1].dequantize(torch.float32), stack.dequantize(torch.float32)[1])


def test_what_no_super_block_has_is_refused():
    found = made("q4_k", 5)
    with pytest.raises(FormatError, match=r"scales have shape \[5, 9\]; \[5, 10\] is needed"):
        QTensor(found.packed, found.scales[:, :9], None, 4, 32, (5, WIDTH))
    with pytest.raises(FormatError, match="cannot be held in super-blocks of 256"):
        QTensor(found.packed[:, :16], found.scales[:, :2], None, 4, 32, (5, 128))
    with pytest.raises(FormatError, match="nothing is rounded to Q4_K, which is read from GGUF files only"):
        quantize(torch.randn(4, 256), 4, 32, "q4_k")
