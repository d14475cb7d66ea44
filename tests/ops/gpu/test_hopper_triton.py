"""Triton functions shared by several families: unpacking, paged positions, merging softmaxes, angles."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from auraflux.ops._cases import relative_rms
from auraflux.ops.attention.reference import merge_partials
from auraflux.ops.gpu.blocks.codes import constants, operands, weights_at
from auraflux.ops.gpu.blocks.pages import Index, place_keys, place_token
from auraflux.ops.gpu.blocks.rope import cos_sin
from auraflux.ops.gpu.blocks.softmax import Partials, launch_merge
from auraflux.ops.gpu.device import INTERPRETED
from auraflux.quant import quantize
from tests.ops.gpu.test_cuda import _sound_interpreter  # noqa: F401

DEVICE = "cpu" if INTERPRETED else "cuda"
FORMATS = [
    *((bits, 64, "affine") for bits in (2, 3, 4, 5, 6, 8)),
    (4, 32, "mxfp4"),
    (8, 64, "fp8"),
    (3, 16, "centred"),
    (6, 16, "centred"),
    (4, 32, "iq4"),
    (4, 32, "iq4_nl"),
    (4, 16, "nvfp4"),
]


@triton.jit
def _weights(packed, scales, biases, out, rows, K, BITS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, 256)
    there = (k < K) & (row < rows)
    found = weights_at(packed, scales, biases, row, k, there, K, BITS, GROUP, FORM)
    tl.store(out + row * K + k, found, mask=there)


@pytest.mark.parametrize(("bits", "group", "kind"), FORMATS)
def test_every_format_is_unpacked(bits: int, group: int, kind: str):
    torch.manual_seed(bits)
    weight = quantize(torch.randn(3, 192).bfloat16(), bits, group, kind).to(DEVICE)
    out = torch.full((3, 192), float("nan"), device=DEVICE)
    _weights[(3,)](*operands(weight), out, 3, 192, **constants(weight))
    assert relative_rms(out, weight.dequantize(torch.float32)) < 1e-6


@triton.jit
def _places(index, out, PAGE: tl.constexpr, S: tl.constexpr):
    token = tl.program_id(0)
    page, slot = place_token(token, index, PAGE, S)
    tl.store(out + 2 * token, page)
    tl.store(out + 2 * token + 1, slot.to(tl.int64))


def test_new_tokens_find_their_page_and_slot():
    # two sequences of 9 and 4 positions in pages of 4, of which 3 and 2 are new; a page outside the pool is none
    table = torch.tensor([[5, 7, 2], [1, 99, 0]], dtype=torch.int32, device=DEVICE)
    lengths, starts = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([9, 5], [0, 3, 5]))
    out = torch.zeros(5, 2, dtype=torch.int64, device=DEVICE)
    _places[(5,)](Index(table, lengths, starts, 2, 3, 8), out, 4, 2)
    assert out.tolist() == [[7, 2], [7, 3], [2, 0], [1, 3], [-1, 0]]


@triton.jit
def _keys(table, out, first, end, width, pool, ALIGNED: tl.constexpr):
    origin, row, there = place_keys(table, first, end, 1, width, pool, 2, 4, 4, ALIGNED)
    tl.store(out + tl.arange(0, 4), tl.where(there, origin + row, -1))


@pytest.mark.parametrize("aligned", [True, False])
def test_keys_are_found_through_the_table(aligned: bool):
    table = torch.tensor([5, 99, 2], dtype=torch.int32, device=DEVICE)
    found = []
    for first in (0, 4, 8):
        out = torch.zeros(4, dtype=torch.int64, device=DEVICE)
        _keys[(1,)](table, out, first, 10, 3, 8, aligned)
        found.append(out.tolist())
    # rows of head 1 of 2 in pages of 4; the second page is outside the pool, and two keys of the last are past the end
    assert found == [[44, 45, 46, 47], [-1] * 4, [20, 21, -1, -1]]


@pytest.mark.usefixtures("_sound_interpreter")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("blocks", [1, 3])
def test_parts_of_a_softmax_are_merged(blocks: int):
    torch.manual_seed(blocks)
    o, m, l = torch.randn(6, blocks, 40), 4 * torch.randn(6, blocks), torch.rand(6, blocks)  # noqa: E741
    l[2, -1] = 0  # nothing was seen
    parts = Partials(*(x.to(DEVICE) for x in (o, m, l)))
    out = torch.full((6, 40), float("nan"), device=DEVICE)
    launch_merge(parts, None, out, 3)
    assert relative_rms(out.cpu(), merge_partials.reference(o, m, l)) < 1e-5


@triton.jit
def _angles(x, cosine, sine):
    at = tl.arange(0, 64)
    c, s = cos_sin(tl.load(x + at))
    tl.store(cosine + at, c)
    tl.store(sine + at, s)


def test_angles_of_far_positions_keep_their_digits():
    angles = torch.from_numpy(np.random.default_rng(0).uniform(-1e6, 1e6, 64).astype(np.float32)).to(DEVICE)
    cosine, sine = torch.empty(2, 64, device=DEVICE)
    _angles[(1,)](angles, cosine, sine)
    torch.testing.assert_close(cosine.double(), angles.double().cos(), rtol=0, atol=3e-7)
    torch.testing.assert_close(sine.double(), angles.double().sin(), rtol=0, atol=3e-7)
