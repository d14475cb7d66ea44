"""GGUF's grid formats: kinds, sizes and slices."""

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType

from auraflux.errors import FormatError
from auraflux.quant import QTensor, quantize
from auraflux.quant.gguf_blocks import from_blocks
from auraflux.quant.grids import FORMATS, table
from tests.quant.test_gguf_blocks import WIDTH, decoded, random_blocks


def made(kind: str, *leading: int) -> QTensor:
    return from_blocks(random_blocks(kind.upper(), *leading), kind.upper())


@pytest.mark.parametrize("kind", FORMATS)
def test_a_weight_takes_the_bytes_of_its_file(kind: str):
    size, nbytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    found = made(kind, 37)
    assert found.kind == kind
    assert found.nbytes == 37 * WIDTH // size * nbytes
    assert not found.in_mlx
    assert found.expand_scales() is found


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("lanes", [4, 16])
def test_rows_are_interleaved_and_back(kind: str, lanes: int):
    found = made(kind, 37)
    lanes_of = found.interleave(lanes)
    assert lanes_of.kind == kind
    assert torch.equal(lanes_of.rows().packed, found.packed)
    assert torch.equal(lanes_of.rows().scales, found.scales)
    wanted = decoded(random_blocks(kind.upper(), 37), kind.upper())
    assert torch.equal(lanes_of.dequantize(), wanted)
    rows = torch.tensor([36, 0, 36])
    assert torch.equal(lanes_of.take(rows).dequantize(), wanted[rows])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_stack_is_indexed_and_sliced(kind: str):
    found, wanted = made(kind, 3, 5), decoded(random_blocks(kind.upper(), 3, 5), kind.upper())
    assert torch.equal(found[1].dequantize(), wanted[1])
    assert torch.equal(found.part(slice(1, 3)).dequantize(), wanted[:, 1:3])
    assert torch.equal(found.flatten_stack().row_range(range(2, 9)).dequantize(), wanted.flatten(0, 1)[2:9])


@pytest.mark.parametrize("kind", FORMATS)
def test_columns_in_whole_super_blocks_stay_in_their_grid(kind: str):
    found, wanted = made(kind, 5), decoded(random_blocks(kind.upper(), 5), kind.upper())
    half = found.columns(range(256, 512))
    assert half.kind == kind
    assert torch.equal(half.dequantize(), wanted[:, 256:])
    swapped = found.permute_columns(torch.tensor([1, 0]), 256)
    assert swapped.kind == kind
    assert torch.equal(swapped.dequantize(), torch.cat([wanted[:, 256:], wanted[:, :256]], 1))


@pytest.mark.parametrize("kind", FORMATS)
def test_parts_of_a_super_block_are_requantized_to_eight_bits(kind: str):
    found, wanted = made(kind, 5), decoded(random_blocks(kind.upper(), 5), kind.upper())
    some = found.columns(range(128, 384))
    assert (some.kind, some.bits) == ("affine", 8)
    assert (some.dequantize() - wanted[:, 128:384]).norm() < 0.01 * wanted[:, 128:384].norm()


def test_a_width_between_super_blocks_is_refused():
    found = made("iq2_xxs", 3)
    with pytest.raises(FormatError, match="cannot be stored in super-blocks of 256"):
        QTensor(found.packed[:, :20], found.scales[:, :1], None, 2, 32, (3, 320))


def test_nothing_is_quantized_to_a_grid():
    with pytest.raises(FormatError, match="IQ2_XXS cannot be quantized to"):
        quantize(torch.randn(4, 256), 2, 32, "iq2_xxs")


@pytest.mark.parametrize(("kind", "most"), [("iq1_s", 8), ("iq2_s", 43), ("iq3_xxs", 62), ("iq3_s", 15)])
def test_entries_are_small_integers(kind: str, most: int):
    assert table(kind).abs().max() == most
