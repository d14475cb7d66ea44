"""AMX: tiles of 16 rows of 64 bytes, and products of two tiles of bytes into a tile of 32-bit sums.

A process asks Linux for permission once. A thread configures its tiles before it uses them and releases them afterwards, so
that context switches do not save 8 KB.
"""

import ctypes
import platform
from functools import cache

from llvmlite import ir
from numba.core import cgutils

from auraflux.ops.simd.vectors import I8, I64, at, call
from auraflux.ops.simd.vectors import store as store_value

ROW_NBYTES = 64
CONFIG_NBYTES = 64
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18


@cache
def is_permitted() -> bool:
    """Ask Linux for the permission to use tiles, for all threads of this process; return whether it is granted."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None, use_errno=True).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0


def _tile(number: int) -> ir.Constant:
    return ir.Constant(I8, number)


def _pointer(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return b.inttoptr(address, I8.as_pointer())


def room(b: ir.IRBuilder, nbytes: int) -> ir.Value:
    """Return the address of memory on the stack, aligned to rows of tiles."""
    slot = cgutils.alloca_once(b, I8, size=nbytes)
    slot.align = ROW_NBYTES
    return b.ptrtoint(slot, I64)


def configure(b: ir.IRBuilder, shapes: dict[int, tuple[int, int]]) -> None:
    """Configure tiles by their rows and bytes per row."""
    address = room(b, CONFIG_NBYTES)
    nbytes = [0] * CONFIG_NBYTES
    nbytes[0] = 1  # the palette
    for tile, (rows, width) in shapes.items():
        nbytes[16 + 2 * tile], nbytes[48 + tile] = width, rows
    words = [int.from_bytes(bytes(nbytes[i : i + 8]), "little") for i in range(0, CONFIG_NBYTES, 8)]
    for i, word in enumerate(words):
        store_value(b, ir.Constant(I64, word), address, 8 * i)
    call(b, "llvm.x86.ldtilecfg", ir.VoidType(), _pointer(b, address))


def release(b: ir.IRBuilder) -> None:
    call(b, "llvm.x86.tilerelease", ir.VoidType())


def zero(b: ir.IRBuilder, tile: int) -> None:
    call(b, "llvm.x86.tilezero", ir.VoidType(), _tile(tile))


def load(b: ir.IRBuilder, tile: int, address: ir.Value, stride: int) -> None:
    call(b, "llvm.x86.tileloadd64", ir.VoidType(), _tile(tile), _pointer(b, address), at(stride))


def store(b: ir.IRBuilder, tile: int, address: ir.Value, stride: int) -> None:
    call(b, "llvm.x86.tilestored64", ir.VoidType(), _tile(tile), _pointer(b, address), at(stride))


def multiply(b: ir.IRBuilder, total: int, signed: int, unsigned: int) -> None:
    """Add products of rows of signed bytes with columns of unsigned bytes, four neighbours of a column in a word."""
    call(b, "llvm.x86.tdpbsud", ir.VoidType(), _tile(total), _tile(signed), _tile(unsigned))
