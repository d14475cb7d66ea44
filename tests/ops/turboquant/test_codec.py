"""The codec: codebooks are optimal, rotations orthogonal, and codes preserve lengths and directions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from auraflux.ops._cases import relative_rms
from auraflux.ops.turboquant import codebook as books
from auraflux.ops.turboquant.cases.inputs import WIDTHS
from auraflux.ops.turboquant.codebook import BITS, boundaries, codebook, nearest, normal_levels
from auraflux.ops.turboquant.pages import pack, row_words, unpack
from auraflux.ops.turboquant.reference import (
    decode,
    encode,
    rotate,
)
from auraflux.ops.turboquant.rotation import random_words, rotation
from tests.ops.quick import some

DISTORTION = {2: 0.1175, 3: 0.03455, 4: 0.009501, 6: 0.0006442, 8: 4.12e-5}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def cells(bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return numbers x on a fine grid, their share of N(0, 1), and the level of each one's cell."""
    x = np.linspace(-9, 9, 2_000_001)
    share = np.exp(-x * x / 2)
    levels = normal_levels(bits)
    return x, share / share.sum(), np.searchsorted((levels[1:] + levels[:-1]) / 2, x)


@pytest.mark.parametrize("bits", BITS)
def test_levels_are_the_means_of_their_cells(bits):
    x, share, cell = cells(bits)
    means = np.bincount(cell, share * x) / np.bincount(cell, share)
    assert np.abs(means - normal_levels(bits)).max() < 2e-5


@pytest.mark.parametrize("bits", BITS)
def test_distortion_of_a_normal_variable(bits):
    x, share, cell = cells(bits)
    distortion = (share * (x - normal_levels(bits)[cell]) ** 2).sum()
    assert distortion == pytest.approx(DISTORTION[bits], rel=0.01)


def test_levels_agree_with_published_ones():
    half = {2: [0.45278, 1.51042], 3: [0.24509, 0.75601, 1.34391, 2.15195]}
    half[4] = [0.128395, 0.388048, 0.656759, 0.942341, 1.256231, 1.618046, 2.069017, 2.732590]
    for bits, levels in half.items():
        np.testing.assert_allclose(normal_levels(bits)[len(levels) :], levels, atol=6e-6)


@pytest.mark.parametrize("bits", BITS)
def test_codebook_is_symmetric_and_scaled(bits):
    book, middles = codebook(bits, 64), boundaries(bits, 64)
    assert book.dtype == middles.dtype == torch.float32
    ascending = book.sort().values
    assert torch.equal(ascending, -ascending.flip(0))
    torch.testing.assert_close(ascending * 8, torch.from_numpy(normal_levels(bits)).float())
    torch.testing.assert_close(middles, (ascending[1:] + ascending[:-1]) / 2)


@pytest.mark.parametrize("bits", BITS)
def test_nearest_is_the_nearest(bits):
    y = torch.randn(7, 128) / math.sqrt(128)
    best = (y.unsqueeze(-1) - codebook(bits, 128)).abs().argmin(-1)
    assert torch.equal(nearest(y, bits), best)


def test_the_order_of_codes_can_be_changed_in_one_place(monkeypatch):
    x = torch.randn(5, 128)
    before = decode(*encode(x, 4, 1), 4, 128, 1)
    codes = encode(x, 4, 1)[0]
    # the sign in the top bit, the magnitude below it
    monkeypatch.setattr(books, "index_of_rank", lambda bits: torch.cat([torch.arange(15, 7, -1), torch.arange(8)]))
    books._tables.cache_clear()
    try:
        assert not torch.equal(encode(x, 4, 1)[0], codes)
        assert torch.equal(decode(*encode(x, 4, 1), 4, 128, 1), before)
        assert codebook(4, 128)[0] > 0 > codebook(4, 128)[8]
    finally:
        books._tables.cache_clear()


@given(bits=st.sampled_from(BITS), width=st.integers(1, 140), rows=st.integers(0, 3), seed=st.integers(0, 999))
@settings(max_examples=60, deadline=None)
def test_packing_round_trip(bits, width, rows, seed):
    codes = torch.randint(0, 1 << bits, (rows, width), generator=torch.Generator().manual_seed(seed))
    words = pack(codes, bits)
    assert words.shape == (rows, row_words(bits, width))
    assert words.dtype == torch.int32
    assert torch.equal(unpack(words, bits, width), codes)


@pytest.mark.parametrize("bits", BITS)
def test_packing_is_one_little_endian_stream(bits):
    codes = torch.randint(0, 1 << bits, (100,))
    stream = sum(code << (d * bits) for d, code in enumerate(codes.tolist()))
    expected = stream.to_bytes(4 * row_words(bits, 100), "little")
    assert pack(codes, bits).numpy().tobytes() == expected


def test_even_coordinates_of_four_bits_are_the_low_nibbles():
    octets = pack(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), 4).view(torch.uint8)
    assert octets.tolist() == [0x21, 0x43, 0x65, 0x87]


def test_random_words_are_the_splitmix64_sequence():
    # the published first outputs for seed 1234567
    assert random_words(3, 1234567).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("width", some([8, 63, 100, *WIDTHS], (8, 63, 100, 64, 128)))
def test_rotation_is_orthogonal(width):
    matrix = rotate(torch.eye(width), 3)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(width), atol=2e-6, rtol=0)
    x = torch.randn(4, width)
    torch.testing.assert_close(rotate(rotate(x, 3), 3, inverse=True), x, atol=1e-5, rtol=0)
    assert not torch.allclose(rotate(x, 4), rotate(x, 3))


def test_power_of_two_widths_take_signs_then_walsh_hadamard():
    width = 16
    parity = [[bin(i & j).count("1") % 2 for j in range(width)] for i in range(width)]
    walsh = 1.0 - 2.0 * torch.tensor(parity, dtype=torch.float32)
    signs = rotation(width, 5).signs
    assert signs.abs().eq(1).all()
    x = torch.randn(3, width)
    torch.testing.assert_close(rotate(x, 5), (x * signs) @ walsh.T / 4)


def test_rotation_of_a_smooth_vector_spreads_it():
    # without the signs, Walsh-Hadamard leaves a constant vector in one coordinate
    turned = rotate(torch.ones(512), 0) / math.sqrt(512)
    assert turned.abs().max() < 5 / math.sqrt(512)


def samples(kind: str, width: int) -> Tensor:
    x = torch.randn(200, width)
    if kind == "student-t":
        x = torch.distributions.StudentT(torch.tensor(3.0)).sample((200, width))
    elif kind == "outliers":
        x[:, 3] += 20
        x[:, width // 2] *= 8
    return x


KINDS = ["normal", "student-t", "outliers"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", some([100, *WIDTHS], (64, 100, 128)))
@pytest.mark.parametrize("bits", BITS)
def test_codes_preserve_length_and_direction(bits, width, kind):
    x = samples(kind, width)
    codes, norms = encode(x, bits, 11)
    back = decode(codes, norms, bits, width, 11)
    torch.testing.assert_close(back.norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=0)
    # <x, decoded> over <x, x>: sqrt(1 - distortion) for normal coordinates, a bias under half a percent from four bits on
    preserved = ((x * back).sum(-1) / x.square().sum(-1)).mean().item()
    assert preserved > math.sqrt(1 - DISTORTION[bits]) - 0.001
    if bits >= 4:
        assert abs(preserved - 1) < 0.005


@pytest.mark.parametrize(("bits", "preserved"), [(2, 0.885), (3, 0.967), (4, 0.991)])
def test_without_the_stored_norm_vectors_would_shrink(bits, preserved):
    x = torch.randn(500, 128)
    codes, _ = encode(x, bits, 0)
    back = decode(codes, x.norm(dim=-1), bits, 128, 0)
    assert ((x * back).sum() / x.square().sum()).item() == pytest.approx(preserved, abs=0.002)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [100, 128])
def test_inner_products_are_in_proportion(bits, width):
    # the slope of <q, decoded> against <q, x> over many queries is the same for all vectors up to noise
    x, q = torch.randn(300, width), torch.randn(500, width)
    true, found = x @ q.T, decode(*encode(x, bits, 2), bits, width, 2) @ q.T
    slope = ((true * found).sum() / true.square().sum()).item()
    assert slope == pytest.approx(math.sqrt(1 - DISTORTION[bits]), abs=0.005)


@pytest.mark.parametrize("width", [100, 128])
def test_zero_vectors_have_norm_zero(width):
    x = torch.randn(3, width)
    x[1] = 0
    codes, norms = encode(x, 3, 0)
    back = decode(codes, norms, 3, width, 0)
    assert norms[1] == 0
    assert back[1].eq(0).all()
    assert back.isfinite().all()


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1e-10, 1e10, 1e30, 1e37])
@pytest.mark.parametrize("width", [100, 128])
def test_length_does_not_change_the_codes(width, scale):
    x = torch.randn(5, width)
    small = (x.double() * scale).float()
    if scale > 1e-38:
        assert torch.equal(encode(small, 4, 0)[0], encode(x, 4, 0)[0])
    back = decode(*encode(small, 4, 0), 4, width, 0)
    assert relative_rms(back, small) < (0.11 if scale > 1e-44 else 1)


def test_a_bad_vector_does_not_touch_its_neighbours():
    x = torch.randn(3, 64)
    clean = encode(x, 4, 0)
    x[1, 7] = math.nan
    codes, norms = encode(x, 4, 0)
    assert norms[1].isnan()
    assert torch.equal(codes[::2], clean[0][::2])
    assert torch.equal(norms[::2], clean[1][::2])


def test_narrow_inputs_are_widened_first():
    x = torch.randn(4, 128).bfloat16()
    for narrow, wide in zip(encode(x, 6, 0), encode(x.float(), 6, 0), strict=True):
        assert torch.equal(narrow, wide)
