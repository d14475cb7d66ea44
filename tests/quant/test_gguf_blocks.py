"""GGUF block types against the gguf package."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from auraflux.errors import FormatError
from auraflux.ops import embed
from auraflux.ops.simd.isa import ISA
from auraflux.quant import grids
from auraflux.quant.gguf_blocks import from_blocks, memory_bits, to_dense
from auraflux.quant.gguf_layouts import LAYOUTS, NOT_IN_MLX

WIDTH = 512
# grids have no smaller format to which parts of a super-block can be widened
EXACT_IN_PARTS = [kind for kind in LAYOUTS if kind.lower() not in grids.FORMATS]
BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5, "MXFP4": 4, "TQ1_0": 2, "TQ2_0": 2}
BITS |= {"NVFP4": 4, "Q6_K": 6, "Q3_K": 3, "Q2_K": 2, "IQ4_NL": 4, "IQ4_XS": 4, "IQ1_S": 1, "IQ1_M": 1}
BITS |= {"IQ2_XXS": 2, "IQ2_XS": 2, "IQ2_S": 2, "IQ3_XXS": 3, "IQ3_S": 3}


SCALES = {"scale", "least"}


def random_blocks(kind: str, *leading: int, decades: int = 6) -> np.ndarray:
    """Return blocks of random codes and scales of ordinary size."""
    rng = np.random.default_rng(len(kind))
    size, nbytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    octets = rng.integers(0, 256, (*leading, WIDTH // size * nbytes), dtype=np.uint8)
    blocks = octets.reshape(-1).view(LAYOUTS[kind].record)
    if kind == "MXFP4":
        blocks["scale"] = rng.integers(100, 140, len(blocks))
        return octets
    if kind == "NVFP4":
        blocks["scales"] = rng.integers(0, 128, (len(blocks), 4), dtype=np.uint8).view("V4")[:, 0]
        return octets
    sizes = rng.standard_normal(len(blocks)) * 10.0 ** rng.integers(-decades, 1, len(blocks))
    for name in SCALES & set(blocks.dtype.names or ()):
        blocks[name] = sizes
    if kind == "IQ1_M":
        set_scales_of_iq1_m(blocks, sizes.astype(np.float16))
    return octets


def set_scales_of_iq1_m(blocks: np.ndarray, scales: np.ndarray) -> None:
    """Write scales into the highest four bits of each 16-bit number of steps."""
    steps = np.ascontiguousarray(blocks["steps"]).view(np.uint16).reshape(-1, 4)
    quarters = scales.view(np.uint16)[:, None] >> np.arange(0, 16, 4, dtype=np.uint16) << np.uint16(12)
    blocks["steps"] = (steps & np.uint16(0x0FFF) | quarters).view("V8")[:, 0]


def decoded(octets: np.ndarray, kind: str) -> torch.Tensor:
    return torch.from_numpy(quants.dequantize(octets, GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("leading", [(1,), (37,), (3, 5)], ids=str)
def test_values_are_exact(kind: str, leading: tuple[int, ...]):
    octets = random_blocks(kind, *leading)
    found = from_blocks(octets, kind)
    assert (found.bits, found.group, found.shape) == (BITS[kind], LAYOUTS[kind].group, (*leading, WIDTH))
    assert torch.equal(found.dequantize(torch.float32), decoded(octets, kind))


@pytest.mark.parametrize("kind", EXACT_IN_PARTS)
def test_columns_can_be_permuted_within_blocks(kind: str):
    """Permute runs of half a super-block, as for the heads of a delta layer."""
    octets, order = random_blocks(kind, 5), torch.tensor([2, 0, 3, 1])
    found = from_blocks(octets, kind).permute_columns(order, 128).dequantize(torch.float32)
    assert torch.equal(found.view(5, 4, 128), decoded(octets, kind).view(5, 4, 128)[:, order])


def test_columns_of_a_group_stay_together():
    with pytest.raises(FormatError, match="cannot be permuted in runs of 16"):
        from_blocks(random_blocks("Q8_0", 5), "Q8_0").permute_columns(torch.arange(32), 16)


@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_non_finite_scales_are_requantized_without_a_warning(scale: float, as_other_type: str):
    octets = np.zeros((2, 110 * 2), np.uint8)
    octets.view(np.float16)[0, 0] = scale
    found = from_blocks(octets, as_other_type).dequantize(torch.float32)
    assert not found[0, :256].isfinite().any()
    assert torch.equal(found[1], decoded(octets, "IQ3_S")[1])


def test_non_finite_scales_are_decoded_without_a_warning():
    octets = np.zeros((1, 20), np.uint8)
    octets.view(np.float16)[0, 0] = np.inf
    assert np.isnan(to_dense(octets, "Q4_1")).all()


@pytest.mark.parametrize("kind", sorted(NOT_IN_MLX))
def test_any_bytes_decode_to_the_same_bits(kind: str):
    size, nbytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    octets = np.random.default_rng(2).integers(0, 256, (50, WIDTH // size * nbytes), dtype=np.uint8)
    blocks = octets.reshape(-1).view(LAYOUTS[kind].record)
    # denormal, largest, infinite, NaN, of either sign; and empty blocks
    awkward = np.array([2**-24, -(2**-15), 65504, -65504, np.inf, -np.inf, np.nan, 0, -0.0], np.float16)
    for name in {"scale", "least"} & set(blocks.dtype.names or ()):
        blocks[name][: len(awkward)] = awkward
    octets[-1] = 0
    found = from_blocks(octets, kind)
    with np.errstate(invalid="ignore"):
        mine, wanted = found.dequantize(), decoded(octets, kind)
    assert not found.in_mlx
    assert torch.equal(mine.isnan(), wanted.isnan())
    numbers = ~wanted.isnan()
    assert numbers.float().mean() > 0.9
    assert torch.equal(mine[numbers].view(torch.int32), wanted[numbers].view(torch.int32))
    ids = torch.arange(50)[wanted.isfinite().all(1)]
    table = from_blocks(octets, kind).interleave(ISA.lanes)
    assert torch.equal(embed(ids, table), wanted[ids])


@pytest.mark.parametrize("kind", LAYOUTS)
def test_memory_bits_match_the_tensor(kind: str):
    found = from_blocks(random_blocks(kind, 3), kind)
    assert found.nbytes * 8 / (3 * WIDTH) == memory_bits(kind, WIDTH)
    assert found.in_mlx == (kind not in NOT_IN_MLX)


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_K", "Q6_K", "IQ4_XS"])
def test_a_weight_of_several_chunks(kind: str, monkeypatch):
    monkeypatch.setattr("auraflux.quant.gguf_blocks.CHUNK", 1024)
    octets = random_blocks(kind, 21)
    assert torch.equal(from_blocks(octets, kind).dequantize(torch.float32), decoded(octets, kind))


def test_half_precision_scales_stay_half_precision():
    for kind in ("Q4_1", "Q5_0", "Q8_0", "IQ4_NL"):
        assert from_blocks(random_blocks(kind, 2), kind).scales.dtype is torch.float16


@pytest.mark.parametrize("largest", [1.0, 65504.0])
def test_q4_0_gets_biases_where_kernels_need_them(largest: float):
    octets = random_blocks("Q4_0", 5)
    octets.reshape(-1).view(LAYOUTS["Q4_0"].record)["scale"][3] = largest
    found = from_blocks(octets, "Q4_0")
    for each in (found, found.interleave(ISA.lanes)):
        assert each.kind == "q4_0"
        expanded = each.expand_scales()
        assert expanded.kind == "affine"
        assert expanded.scales.dtype is (torch.float16 if largest == 1 else torch.float32)
        assert torch.equal(expanded.dequantize(torch.float32), decoded(octets, "Q4_0"))


def test_a_bias_too_large_for_half_precision_widens_the_scales():
    octets = random_blocks("Q8_0", 4)
    octets.reshape(-1).view(LAYOUTS["Q8_0"].record)["scale"][5] = 1000
    found = from_blocks(octets, "Q8_0")
    assert found.scales.dtype is torch.float32
    assert torch.equal(found.dequantize(), decoded(octets, "Q8_0"))


@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if kind != "MXFP4"])
@pytest.mark.parametrize("size", [0.0, 2**-24, -(2**-15), 65504.0, -65504.0])
def test_the_smallest_and_largest_scales_are_exact(kind: str, size: float):
    octets = random_blocks(kind, 4)
    blocks = octets.reshape(-1).view(LAYOUTS[kind].record)
    for name in {"scale", "least"} & set(blocks.dtype.names or ()):
        blocks[name] = size
    assert torch.equal(from_blocks(octets, kind).dequantize(torch.float32), decoded(octets, kind))


@pytest.fixture
def as_other_type(monkeypatch) -> str:
    """Return a type without a layout."""
    monkeypatch.setattr("auraflux.quant.gguf_blocks.LAYOUTS", {})
    return "IQ3_S"


def test_other_types_are_requantized_to_eight_bits(as_other_type: str):
    kind, rng = as_other_type, np.random.default_rng(1)
    size, nbytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (6 * WIDTH // size, nbytes), dtype=np.uint8)
    # the half-precision scale is first
    blocks[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    octets = blocks.reshape(2, 3, -1)
    found, wanted = from_blocks(octets, kind), decoded(octets, kind)
    assert (found.bits, found.group, found.shape) == (8, 64, (2, 3, WIDTH))
    assert (found.dequantize() - wanted).norm() < 0.01 * wanted.norm()
    spread = wanted.unflatten(-1, (-1, 64)).amax(-1) - wanted.unflatten(-1, (-1, 64)).amin(-1)
    assert ((found.dequantize() - wanted).unflatten(-1, (-1, 64)).abs().amax(-1) <= 0.51 / 255 * spread + 1e-6).all()


def test_a_type_without_a_decoder_is_refused():
    with pytest.raises(FormatError, match="GGUF type Q8_1 cannot be decoded"):
        from_blocks(np.zeros((2, 40 * 4), np.uint8), "Q8_1")
