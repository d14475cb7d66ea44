"""Weight formats against mlx, the reference implementation."""

import mlx.core as mx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant import QTensor, affine, mxfp4, quantize
from auraflux.quant.packing import LANE_FIELDS, from_lane_layout, pack, to_lane_layout, unpack
from tests.mlx_arrays import from_mlx, to_mlx

FORMATS = [(bits, group) for bits in affine.BITS for group in affine.GROUPS]
DTYPES = affine.SCALE_DTYPES


def awkward(dtype: torch.dtype) -> Tensor:
    """Return rows of all kinds: zeros, constants, one sign only, tiny, huge, ties halfway between levels."""
    torch.manual_seed(0)
    w = torch.randn(40, 512) * torch.rand(40, 1) * 2
    w[0] = 0
    w[1] = 0.5
    w[2], w[3] = w[2].abs(), -w[3].abs()
    w[4], w[5] = w[4] * 1e-4, w[5] * 1e3
    w[6] = torch.randint(-4, 5, (512,)) / 4
    w[7, ::2] = 0
    return w.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_affine_is_bit_identical_to_mlx(bits: int, group: int, dtype: torch.dtype):
    weight = awkward(dtype)
    made = quantize(weight, bits, group)
    theirs = mx.quantize(to_mlx(weight), group_size=group, bits=bits)
    for mine, wanted in zip((made.packed, made.scales, made.biases), map(from_mlx, theirs), strict=True):
        assert torch.equal(mine, wanted)
    assert torch.equal(made.dequantize(), from_mlx(mx.dequantize(*theirs, group_size=group, bits=bits)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mxfp4_is_bit_identical_to_mlx(dtype: torch.dtype):
    weight = awkward(dtype)
    made = quantize(weight, kind="mxfp4")
    theirs = mx.quantize(to_mlx(weight), group_size=32, bits=4, mode="mxfp4")
    assert torch.equal(made.packed, from_mlx(theirs[0]))
    assert torch.equal(made.scales, from_mlx(theirs[1]))
    assert torch.equal(made.dequantize(), from_mlx(mx.dequantize(*theirs, group_size=32, bits=4, mode="mxfp4")))


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("rows", [1, 15, 16, 33])
@pytest.mark.parametrize("bits", affine.BITS)
def test_interleaved_rows_hold_the_same_weight(bits: int, rows: int, lanes: int):
    torch.manual_seed(rows)
    weight = quantize(torch.randn(3, rows, 64), bits, 32)
    interleaved = weight.interleave(lanes)
    assert torch.equal(interleaved.dequantize(), weight.dequantize())
    assert torch.equal(interleaved.rows().packed, weight.packed)
    assert torch.equal(interleaved[1].dequantize(), weight[1].dequantize())
    some = torch.tensor([rows - 1, 0])
    assert torch.equal(interleaved[2].take(some).packed, weight[2].take(some).packed)
    if rows % lanes == 0:
        assert interleaved.nbytes == weight.nbytes


def test_interleaving_puts_lanes_next_to_each_other():
    weight = quantize(torch.randn(8, 64), 8, 32)
    interleaved = weight.interleave(4)
    assert torch.equal(interleaved.packed[1, 3], weight.packed[4:8, 3])
    assert torch.equal(interleaved.interleave(8).packed[0, 5], weight.packed[:, 5])


@given(st.sampled_from(affine.BITS), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_packing_round_trips(bits: int, chunks: int, seed: int):
    codes = torch.randint(0, 2**bits, (2, 32 * chunks), generator=torch.Generator().manual_seed(seed))
    words = pack(codes, bits)
    assert words.shape == (2, bits * chunks)
    assert torch.equal(unpack(words, bits), codes.to(torch.uint8))


@given(st.sampled_from(sorted(LANE_FIELDS)), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_codes_are_found_in_their_lane_fields(bits: int, chunks: int, seed: int):
    codes = torch.randint(0, 2**bits, (2, 32 * chunks), generator=torch.Generator().manual_seed(seed))
    words = pack(codes, bits)
    lanes = to_lane_layout(words, bits)
    octets = lanes.view(torch.uint8).view(2, chunks, bits, 4).long()
    for number, fields in enumerate(LANE_FIELDS[bits]):
        found = torch.zeros(2, chunks, 4, dtype=torch.long)
        for field in fields:
            found = found << field.size | octets[:, :, field.word] >> field.low & 2**field.size - 1
        assert torch.equal(found, codes.view(2, chunks, 8, 4)[:, :, number])
    assert torch.equal(from_lane_layout(lanes, bits), words)


@pytest.mark.parametrize("bits", sorted(LANE_FIELDS))
def test_lane_fields_use_every_bit_once(bits: int):
    taken = [(p.word, p.low + i) for fields in LANE_FIELDS[bits] for p in fields for i in range(p.size)]
    assert sorted(taken) == [(word, bit) for word in range(bits) for bit in range(8)]


def test_packing_is_a_little_endian_stream():
    codes = torch.arange(32) % 8
    stream = sum(int(code) << (3 * i) for i, code in enumerate(codes))
    words = [int(w) & 0xFFFFFFFF for w in pack(codes, 3)]
    assert words == [(stream >> (32 * i)) & 0xFFFFFFFF for i in range(3)]


def test_mxfp4_exponent_255_means_nan():
    weight = quantize(torch.randn(2, 32), kind="mxfp4")
    weight.scales[0] = 255
    assert weight.dequantize()[0].isnan().all()
    assert not weight.dequantize()[1].isnan().any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(torch.randn(4, 64), 7), "7 bits in groups of 64 is not a format"),
        (lambda: quantize(torch.randn(4, 64), 4, 16), "groups of 16 is not a format"),
        (lambda: quantize(torch.randn(4, 100), 4, 64), "groups of 64 do not divide the input width 100"),
        (lambda: quantize(torch.randn(64), 4, 64), r"shape \[64\] cannot be quantized"),
        (lambda: quantize(torch.ones(4, 64, dtype=torch.int8)), "dtype torch.int8 cannot be quantized"),
        (lambda: quantize(torch.randn(4, 64), 8, kind="mxfp4"), "MXFP4 has 4 bits and groups of 32"),
        (lambda: quantize(torch.randn(4, 64), kind="nvfp8"), "no weight format 'nvfp8'"),
        (lambda: quantize(torch.randn(4, 64), kind="nvfp4"), "NVFP4 has 4 bits and groups of 16"),
        (lambda: quantize(torch.randn(4, 64))[0], "only a stack of matrices can be indexed"),
    ],
)
def test_unsupported_formats_are_refused(call, message: str):
    with pytest.raises(FormatError, match=message):
        call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packed": lambda t: t[:, :3]}, r"packed have shape \[4, 3\]; \[4, 8\] is needed for a 4-bit \[4, 64\]"),
        ({"scales": lambda t: t[:2]}, r"scales have shape \[2, 1\]; \[4, 1\] is needed"),
        ({"packed": lambda t: t.float()}, "packed codes have dtype torch.float32; int32 is needed"),
        ({"scales": lambda t: t.double()}, "scales have dtype torch.float64; affine holds"),
        ({"biases": lambda t: t.to("meta")}, "biases are on meta, the codes on cpu"),
    ],
)
def test_mismatched_arrays_are_named(change, message: str):
    weight = quantize(torch.randn(4, 64), 4, 64)
    arrays = {name: getattr(weight, name) for name in ("packed", "scales", "biases")}
    arrays |= {name: convert(arrays[name]) for name, convert in change.items()}
    with pytest.raises(FormatError, match=message):
        QTensor(**arrays, bits=4, group=64, shape=(4, 64))


def test_levels_of_mxfp4():
    assert mxfp4.levels().tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
