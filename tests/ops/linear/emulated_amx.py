"""AMX by vector instructions: tiles are stack memory of a kernel, so that its tests run on any processor with AVX-512."""

from llvmlite import ir
from numba.core import cgutils

from auraflux.ops.simd import amx
from auraflux.ops.simd.amx import ROW_NBYTES
from auraflux.ops.simd.vectors import I8, I32, at, load, pick, spread, store, vector

MOST_ROWS = 16
WORDS = ROW_NBYTES // 4
_room = amx.room


class Tiles:
    """The tiles of the functions that are being compiled: their memory, and the bytes of their rows where they were loaded.

    rows  of tiles of signed bytes and of sums; a tile of unsigned bytes has one for each word of the signed tile loaded before
    """

    def __init__(self, rows: dict[int, int]):
        self.rows, self._words = rows, 0
        self._memory: dict[tuple[ir.Function, int], ir.Value] = {}
        self._widths: dict[tuple[ir.Function, int], int] = {}

    def _at(self, b: ir.IRBuilder, tile: int) -> ir.Value:
        if (b.function, tile) not in self._memory:
            self._memory[b.function, tile] = _room(b, MOST_ROWS * ROW_NBYTES)
        return self._memory[b.function, tile]

    def configure(self, b: ir.IRBuilder, shapes: dict[int, tuple[int, int]]) -> None:
        """Do nothing: shapes are known."""

    def release(self, b: ir.IRBuilder) -> None:
        """Do nothing."""

    def zero(self, b: ir.IRBuilder, tile: int) -> None:
        target = self._at(b, tile)
        with cgutils.for_range(b, at(self.rows[tile])) as row:
            store(b, ir.Constant(vector(I32, WORDS), [0] * WORDS), target, b.mul(row.index, at(ROW_NBYTES)))

    def load(self, b: ir.IRBuilder, tile: int, address: ir.Value, stride: int) -> None:
        self._widths[b.function, tile] = stride
        if tile in self.rows:
            self._words = stride // 4
        self._copy(b, tile, vector(I8, stride), (address, stride), (self._at(b, tile), ROW_NBYTES))

    def store(self, b: ir.IRBuilder, tile: int, address: ir.Value, stride: int) -> None:
        self._copy(b, tile, vector(I32, WORDS), (self._at(b, tile), ROW_NBYTES), (address, stride))

    def _copy(self, b, tile, kind, source, target):
        with cgutils.for_range(b, at(self.rows.get(tile, self._words))) as row:
            found = load(b, source[0], b.mul(row.index, at(source[1])), kind)
            store(b, found, target[0], b.mul(row.index, at(target[1])))

    def multiply(self, b: ir.IRBuilder, total: int, signed: int, unsigned: int) -> None:
        sums, tokens, rows = (self._at(b, tile) for tile in (total, signed, unsigned))
        wide, words = vector(I32, ROW_NBYTES), self._widths[b.function, signed] // 4
        with cgutils.for_range(b, at(self.rows[total])) as token, cgutils.for_range(b, at(words)) as word:
            here = b.mul(token.index, at(ROW_NBYTES))
            four = spread(b, load(b, tokens, b.add(here, b.mul(word.index, at(4))), I32), WORDS)
            codes = load(b, rows, b.mul(word.index, at(ROW_NBYTES)), vector(I8, ROW_NBYTES))
            products = b.mul(b.sext(b.bitcast(four, codes.type), wide), b.zext(codes, wide))
            found = load(b, sums, here, vector(I32, WORDS))
            for part in range(4):
                found = b.add(found, pick(b, products, products, list(range(part, ROW_NBYTES, 4))))
            store(b, found, sums, here)


def emulate(rows: dict[int, int]) -> None:
    """Let kernels that are compiled from now on in this process use emulated tiles with so many rows."""
    tiles = Tiles(rows)
    for name in ("configure", "release", "zero", "load", "store", "multiply"):
        setattr(amx, name, getattr(tiles, name))
