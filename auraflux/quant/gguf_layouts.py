"""The layouts of GGUF's block types, and how each is split into codes, scales and biases.

A block is a few bytes of scales followed by the codes of 32 or 256 weights. Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K and Q5_K are
code * scale + bias in groups of 32, Q2_K in groups of 16, TQ1_0 and TQ2_0 in groups of 128; MXFP4 is the usual format. Q3_K,
Q6_K, IQ4_NL and IQ4_XS are level * scale (`levels.py`). Blocks of 256 with low-bit group scales stay super-blocks
(`super_blocks.py`), and IQ1, IQ2 and IQ3 have grids (`grids.py`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gguf import quants
from numpy.typing import NDArray

from auraflux.quant import grids, super_blocks

GROUP = 32
NAN = 0x7F  # of FP8

Array = NDArray[Any]
Parts = tuple[Array, Array, Array | None]  # codes, scales (or words of super-blocks), biases of blocks


class Layout(NamedTuple):
    """The layout of a block type in a file, and the function that splits its blocks.

    record      fields of one block
    bits        of a code
    size        weights in a block
    split       blocks -> codes as bytes [n, size*bits/8], scales and biases [n, size/group]; words [n, words] of super-blocks
    group       weights that share a scale
    scale_bits  of a group's scale and bias in memory
    """

    record: np.dtype
    bits: int
    size: int
    split: Callable[[Array], Parts]
    group: int = GROUP
    scale_bits: int = 32


def _record(**fields: str) -> np.dtype:
    return np.dtype(list(fields.items()))


def _split_nibbles(octets: Array) -> tuple[Array, Array]:
    """Pack the low nibbles of each two bytes into one, and the high nibbles: [n] records -> twice [n, bytes/2]."""
    pairs = np.ascontiguousarray(octets).view(np.uint16).reshape(len(octets), -1)
    high = pairs >> np.uint16(4)
    high &= np.uint16(0x0F0F)
    pairs &= np.uint16(0x0F0F)
    pairs |= pairs >> np.uint16(4)
    high |= high >> np.uint16(4)
    return pairs.astype(np.uint8), high.astype(np.uint8)


def _nibbles(blocks: Array) -> Array:
    """Return 4-bit codes in order: the low nibbles of 16 bytes are the first 16 weights, the high nibbles the others."""
    codes = np.empty((len(blocks), 2), np.uint64)
    for half, octets in enumerate(_split_nibbles(blocks["codes"])):
        codes[:, half] = octets.view(np.uint64)[:, 0]
    return codes.view(np.uint8)


def _stream(codes: Array, bits: int) -> Array:
    """Pack codes into a bit stream without gaps: uint8 [n, weights] -> uint8 [n, weights*bits/8]."""
    eights = codes.reshape(-1, 8)
    words = eights[:, 7].astype(np.uint64)
    for i in range(6, -1, -1):
        words <<= np.uint64(bits)
        words |= eights[:, i]
    return words.view(np.uint8).reshape(len(codes), -1, 8)[:, :, :bits].reshape(len(codes), -1)


def _octets(blocks: Array, field: str, *shape: int) -> Array:
    return np.ascontiguousarray(blocks[field]).view(np.uint8).reshape(-1, *shape)


def _fields(octets: Array, bits: int) -> Array:
    """Extract fields of `bits` bits: the lowest of a row of bytes, then those above them; [n, rows, m] -> [n, weights]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (octets[:, :, None] >> shifts & np.uint8(2**bits - 1)).reshape(len(octets), -1)


def _unpacked(blocks: Array) -> Array:
    """Return the low four bits of 32 codes as bytes, [n, 32]."""
    return _fields(_octets(blocks, "codes", 1, 16), 4)


def _centred(blocks: Array, zero: int) -> tuple[Array, Array]:
    """Return scale and bias of a type whose code `zero` is 0; in half precision where the product is finite."""
    scales: Array = np.ascontiguousarray(blocks["scale"])[:, None]
    biases: Array = scales * np.float16(-zero)
    # scaling by a power of two is exact unless it overflows
    if not np.isfinite(biases).all():
        scales = scales.astype(np.float32)
        biases = scales * np.float32(-zero)
    return scales, biases


def _ranged(blocks: Array) -> tuple[Array, Array]:
    return np.ascontiguousarray(blocks["scale"])[:, None], np.ascontiguousarray(blocks["least"])[:, None]


def _q4_0(blocks: Array) -> Parts:
    return _nibbles(blocks), np.ascontiguousarray(blocks["scale"]).view(np.int16)[:, None], None


def _q4_1(blocks: Array) -> Parts:
    return _nibbles(blocks), *_ranged(blocks)


def _fifth_bits(blocks: Array) -> Array:
    return np.unpackbits(_octets(blocks, "fifth", 4), axis=1, bitorder="little")


def _q5_0(blocks: Array) -> Parts:
    return _stream(_unpacked(blocks) | _fifth_bits(blocks) << np.uint8(4), 5), *_centred(blocks, 16)


def _q5_1(blocks: Array) -> Parts:
    return _stream(_unpacked(blocks) | _fifth_bits(blocks) << np.uint8(4), 5), *_ranged(blocks)


def _q8_0(blocks: Array) -> Parts:
    codes = np.ascontiguousarray(blocks["codes"]).view(np.uint8).reshape(-1, 32)
    return codes ^ np.uint8(128), *_centred(blocks, 128)


def _mxfp4(blocks: Array) -> Parts:
    return _nibbles(blocks), np.ascontiguousarray(blocks["scale"])[:, None], None


def _nvfp4(blocks: Array) -> Parts:
    """Return four groups of 16, with scales as bytes of FP8."""
    groups = _octets(blocks, "codes", 4, 8)
    # the low nibbles of 8 bytes are the first 8 weights
    ordered = np.concatenate([groups & np.uint8(15), groups >> np.uint8(4)], -1).reshape(len(groups), -1, 2)
    # gguf has no negative zero
    ordered[ordered == 8] = 0
    scales = _octets(blocks, "scales", 4)
    scales[scales == NAN] = 0  # as gguf
    return ordered[..., 0] | ordered[..., 1] << np.uint8(4), scales, None


def _words(blocks: Array, steps: Array) -> Array:
    """Return words of super-blocks with biases: scale and bias in half precision, then the steps, bytes [n, m]."""
    ends = np.stack([blocks["scale"], -blocks["least"]], 1)
    return np.concatenate([ends.view(np.int32), np.ascontiguousarray(steps).view(np.int32)], 1)


def _level_words(blocks: Array, steps: Array) -> Array:
    """Return words of super-blocks without biases: the scale in single precision, then the steps, int8 [n, m]."""
    scale = blocks["scale"].astype(np.float32)[:, None]
    return np.concatenate([scale.view(np.int32), (steps.view(np.uint8) ^ np.uint8(super_blocks.ZERO)).view(np.int32)], 1)


def _k_words(blocks: Array) -> Array:
    """Return words of super-blocks of eight groups of 32, with 6-bit steps."""
    steps = quants.Q4_K.get_scale_min(np.ascontiguousarray(blocks["steps"]).view(np.uint8).reshape(-1, 12))
    return _words(blocks, np.concatenate(steps, 1))


def _q4_k(blocks: Array) -> Parts:
    # each 32 bytes hold one group in their low nibbles and the next in their high ones
    codes = np.empty((len(blocks), 4, 2), "V16")
    for half, octets in enumerate(_split_nibbles(blocks["codes"])):
        codes[:, :, half] = octets.view("V16")
    return codes.view(np.uint8).reshape(len(blocks), -1), _k_words(blocks), None


def _q5_k(blocks: Array) -> Parts:
    # bit g of byte i is the fifth bit of weight i of group g
    low, top = _fields(_octets(blocks, "codes", 4, 32), 4), _fields(_octets(blocks, "fifth", 1, 32), 1)
    return _stream(low | top << np.uint8(4), 5), _k_words(blocks), None


def _q6_k(blocks: Array) -> Parts:
    low, top = _fields(_octets(blocks, "codes", 2, 64), 4), _fields(_octets(blocks, "top", 2, 32), 2)
    return _stream(low | top << np.uint8(4), 6), _level_words(blocks, _octets(blocks, "steps", 16).view(np.int8)), None


def _q3_k(blocks: Array) -> Parts:
    low, top = _fields(_octets(blocks, "codes", 2, 32), 2), _fields(_octets(blocks, "top", 1, 32), 1)
    steps = _octets(blocks, "steps", 12)
    # 16 of six bits: four in the first eight bytes, two in the last four
    wide = _fields(steps[:, None, :8], 4) | _fields(steps[:, None, 8:], 2) << np.uint8(4)
    return _stream(low | top << np.uint8(2), 3), _level_words(blocks, wide.astype(np.int8) - np.int8(32)), None


def _q2_k(blocks: Array) -> Parts:
    return _stream(_fields(_octets(blocks, "codes", 2, 32), 2), 2), _words(blocks, _octets(blocks, "steps", 16)), None


def _ternary(blocks: Array, codes: Array) -> Parts:
    """Split ternary blocks: (code - 1) * scale, with one scale for two groups."""
    scales, biases = (np.repeat(each, 2, axis=1) for each in _centred(blocks, 1))
    return _stream(codes, 2), scales, biases


def _threes(octets: Array, count: int) -> Array:
    """Extract the `count` highest base-3 digits of bytes: [n, m] -> [n, count * m]."""
    rest = octets[:, None] * (np.uint8(3) ** np.arange(count, dtype=np.uint8))[:, None]
    return (rest.astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.uint8).reshape(len(octets), -1)


def _tq1_0(blocks: Array) -> Parts:
    octets, last = _octets(blocks, "codes", 48), _octets(blocks, "last", 4)
    codes = np.concatenate([_threes(octets[:, :32], 5), _threes(octets[:, 32:], 5), _threes(last, 4)], 1)
    return _ternary(blocks, codes)


def _tq2_0(blocks: Array) -> Parts:
    return _ternary(blocks, _fields(_octets(blocks, "codes", 2, 32), 2))


def _iq4_nl(blocks: Array) -> Parts:
    return _nibbles(blocks), np.ascontiguousarray(blocks["scale"])[:, None], None


def _iq4_xs(blocks: Array) -> Parts:
    codes = np.ascontiguousarray(blocks["codes"]).view("V16").reshape(-1)
    low = _octets(blocks, "steps", 4, 1) >> np.array([0, 4], np.uint8) & np.uint8(15)
    high = blocks["high"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    steps = (low.reshape(-1, 8) | high.astype(np.uint8) << np.uint8(4)).astype(np.int8) - np.int8(32)
    packed = _nibbles(codes.view(_record(codes="V16"))).reshape(len(blocks), -1)
    return packed, _level_words(blocks, steps), None


def _grid(blocks: Array, first: str, *others: str, halves: tuple[str, ...]) -> Parts:
    """Join fields of chunks, and the fields that are halves of a super-block."""
    chunks = [_octets(blocks, field, 8, blocks[field].dtype.itemsize // 8) for field in (first, *others)]
    found = [np.ascontiguousarray(blocks[field]).view(np.int16).reshape(len(blocks), -1) for field in halves]
    return np.concatenate(chunks, 2).reshape(len(blocks), -1), np.concatenate(found, 1), None


def _iq1_s(blocks: Array) -> Parts:
    return _grid(blocks, "codes", halves=("scale", "highs"))


def _iq1_m(blocks: Array) -> Parts:
    return _grid(blocks, "codes", halves=("steps", "highs"))


def _iq2_xxs(blocks: Array) -> Parts:
    return _grid(blocks, "codes", halves=("scale",))


def _iq2_xs(blocks: Array) -> Parts:
    packed, halves, _ = _grid(blocks, "codes", halves=("scale", "steps"))
    # the low bytes of four entries, then their high bytes
    pairs = packed.reshape(len(blocks), -1, 4, 2).transpose(0, 1, 3, 2)
    return np.ascontiguousarray(pairs).reshape(packed.shape), halves, None


def _iq2_s(blocks: Array) -> Parts:
    return _grid(blocks, "codes", "signs", halves=("scale", "steps", "highs"))


def _iq3_xxs(blocks: Array) -> Parts:
    return _grid(blocks, "codes", "signs", halves=("scale",))


def _iq3_s(blocks: Array) -> Parts:
    return _grid(blocks, "codes", "signs", halves=("scale", "steps", "highs"))


LAYOUTS = {
    "Q4_0": Layout(_record(scale="<f2", codes="V16"), 4, 32, _q4_0, scale_bits=16),
    "Q4_1": Layout(_record(scale="<f2", least="<f2", codes="V16"), 4, 32, _q4_1),
    "Q5_0": Layout(_record(scale="<f2", fifth="V4", codes="V16"), 5, 32, _q5_0),
    "Q5_1": Layout(_record(scale="<f2", least="<f2", fifth="V4", codes="V16"), 5, 32, _q5_1),
    "Q8_0": Layout(_record(scale="<f2", codes="V32"), 8, 32, _q8_0),
    "Q4_K": Layout(_record(scale="<f2", least="<f2", steps="V12", codes="V128"), 4, 256, _q4_k),
    "Q5_K": Layout(_record(scale="<f2", least="<f2", steps="V12", fifth="V32", codes="V128"), 5, 256, _q5_k),
    "Q6_K": Layout(_record(codes="V128", top="V64", steps="V16", scale="<f2"), 6, 256, _q6_k, 16),
    "Q3_K": Layout(_record(top="V32", codes="V64", steps="V12", scale="<f2"), 3, 256, _q3_k, 16),
    "Q2_K": Layout(_record(steps="V16", codes="V64", scale="<f2", least="<f2"), 2, 256, _q2_k, 16),
    "IQ4_NL": Layout(_record(scale="<f2", codes="V16"), 4, 32, _iq4_nl, scale_bits=16),
    "IQ4_XS": Layout(_record(scale="<f2", high="<u2", steps="V4", codes="V128"), 4, 256, _iq4_xs),
    "IQ1_S": Layout(_record(scale="<f2", codes="V32", highs="V16"), 1, 256, _iq1_s),
    "IQ1_M": Layout(_record(codes="V32", highs="V16", steps="V8"), 1, 256, _iq1_m, 16),
    "IQ2_XXS": Layout(_record(scale="<f2", codes="V64"), 2, 256, _iq2_xxs),
    "IQ2_XS": Layout(_record(scale="<f2", codes="V64", steps="V8"), 2, 256, _iq2_xs, 16),
    "IQ2_S": Layout(_record(scale="<f2", codes="V32", signs="V32", highs="V8", steps="V8"), 2, 256, _iq2_s, 16),
    "IQ3_XXS": Layout(_record(scale="<f2", codes="V64", signs="V32"), 3, 256, _iq3_xxs),
    "IQ3_S": Layout(_record(scale="<f2", codes="V64", highs="V8", signs="V32", steps="V4"), 3, 256, _iq3_s),
    "TQ1_0": Layout(_record(codes="V48", last="V4", scale="<f2"), 2, 256, _tq1_0, 128),
    "TQ2_0": Layout(_record(codes="V64", scale="<f2"), 2, 256, _tq2_0, 128),
    "NVFP4": Layout(_record(scales="V4", codes="V32"), 4, 64, _nvfp4, 16),
    "MXFP4": Layout(_record(scale="u1", codes="V16"), 4, 32, _mxfp4, scale_bits=8),
}

# types without an MLX format
NOT_IN_MLX = {"Q6_K", "Q3_K", "Q2_K", "IQ4_NL", "IQ4_XS", "NVFP4", *map(str.upper, grids.FORMATS)}
