"""CRC-32 of bytes in jitted code, as `zlib.crc32` computes it, and the CRC of two pieces from theirs.

Eight bytes are looked up at once in eight tables. The CRC is linear over GF(2): that of `a + b` is that of `a`, advanced by as
many zero bytes as b has, xor that of b. A table advances a CRC by a fixed number of bytes, one lookup per byte of the CRC.
"""

import numpy as np

from auraflux.ops.simd.compile.compiler import jit_with
from auraflux.ops.simd.jit import int64s, octets, uint32s

POLYNOMIAL = 0xEDB88320
STEP_WORDS, ADVANCE_WORDS = 8 * 256, 4 * 256
START = np.uint32(0xFFFFFFFF)

inlined = jit_with("contract")


def step_table() -> np.ndarray:
    """Return the tables of `crc32`, uint32 [8, 256]: table n advances a byte by n more zero bytes."""
    first = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        first = np.where(first & 1, first >> 1 ^ np.uint32(POLYNOMIAL), first >> 1)
    made = [first]
    for _ in range(7):
        made.append(made[-1] >> 8 ^ first[made[-1] & 0xFF])
    return np.stack(made).astype(np.uint32)


def advance_table(nbytes: int) -> np.ndarray:
    """Return the tables of `advanced` for so many bytes, uint32 [4, 256]."""
    columns = _columns(nbytes)
    made = np.zeros((4, 256), np.uint32)
    for place in range(4):
        for value in range(256):
            made[place, value] = _apply(columns, value << 8 * place)
    return made


def _columns(nbytes: int) -> list[int]:
    """Return what zero bytes make of each bit of a CRC, by squaring."""
    square = [POLYNOMIAL, *(1 << bit for bit in range(31))]
    found = [1 << bit for bit in range(32)]
    bits = 8 * nbytes
    while bits:
        if bits & 1:
            found = [_apply(square, column) for column in found]
        square = [_apply(square, column) for column in square]
        bits >>= 1
    return found


def _apply(columns: list[int], value: int) -> int:
    total = 0
    for bit, column in enumerate(columns):
        if value >> bit & 1:
            total ^= column
    return total


@inlined
def advanced(table, crc):
    """Return a CRC after zero bytes, given the address of `advance_table` for their number."""
    steps = uint32s(table, ADVANCE_WORDS)
    found = steps[crc & np.uint32(255)] ^ steps[256 + (crc >> np.uint32(8) & np.uint32(255))]
    return found ^ steps[512 + (crc >> np.uint32(16) & np.uint32(255))] ^ steps[768 + (crc >> np.uint32(24))]


@inlined
def _next(steps, crc, word):
    """Return a CRC after eight more bytes."""
    low, high = np.uint32(word) ^ crc, np.uint32(word >> np.uint64(32))
    return (
        steps[1792 + (low & np.uint32(255))]
        ^ steps[1536 + (low >> np.uint32(8) & np.uint32(255))]
        ^ steps[1280 + (low >> np.uint32(16) & np.uint32(255))]
        ^ steps[1024 + (low >> np.uint32(24))]
        ^ steps[768 + (high & np.uint32(255))]
        ^ steps[512 + (high >> np.uint32(8) & np.uint32(255))]
        ^ steps[256 + (high >> np.uint32(16) & np.uint32(255))]
        ^ steps[high >> np.uint32(24)]
    )


@inlined
def crc32(table, address, nbytes):
    """Return the CRC-32 of bytes, given the address of `step_table`."""
    steps, words = uint32s(table, STEP_WORDS), int64s(address, nbytes // 8)
    crc = START
    for at in range(nbytes // 8):
        crc = _next(steps, crc, np.uint64(words[at]))
    rest = octets(address + nbytes // 8 * 8, nbytes % 8)
    for at in range(nbytes % 8):
        crc = steps[(crc ^ np.uint32(rest[at])) & np.uint32(255)] ^ crc >> np.uint32(8)
    return crc ^ START


@inlined
def crc32_of_quarters(table, quarter, address, nbytes):
    """Return the CRC-32 of a multiple of 32 bytes, faster: the CRCs of four quarters do not wait for each other.

    quarter  address of `advance_table` for a quarter of the bytes
    """
    steps, count = uint32s(table, STEP_WORDS), nbytes // 32
    words = int64s(address, 4 * count)
    first = second = third = fourth = START
    for at in range(count):
        first = _next(steps, first, np.uint64(words[at]))
        second = _next(steps, second, np.uint64(words[count + at]))
        third = _next(steps, third, np.uint64(words[2 * count + at]))
        fourth = _next(steps, fourth, np.uint64(words[3 * count + at]))
    found = advanced(quarter, first ^ START) ^ second ^ START
    return advanced(quarter, advanced(quarter, found) ^ third ^ START) ^ fourth ^ START
