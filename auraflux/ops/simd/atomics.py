"""Atomic words in memory that threads share, the spin-wait hint and calls of libc functions, for jitted code.

Words are 64 bits wide; those of `load_int32` and `store_int32` 32 bits, as a GPU writes them. Addresses are integers.
"""

import platform

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

WORD, HALF_WORD = ir.IntType(64), ir.IntType(32)


def _pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type = WORD) -> ir.Value:
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic
def load(typingctx, address):
    """Load a shared word atomically."""

    def codegen(context, builder, signature, values):
        return builder.load_atomic(_pointer(builder, values[0]), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store(typingctx, address, value):
    """Store a shared word atomically."""

    def codegen(context, builder, signature, values):
        builder.store_atomic(values[1], _pointer(builder, values[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def load_int32(typingctx, address):
    """Load a shared int32 atomically; later loads are not moved before it."""

    def codegen(context, builder, signature, values):
        return builder.sext(builder.load_atomic(_pointer(builder, values[0], HALF_WORD), "acquire", 4), WORD)

    return types.int64(types.int64), codegen


@intrinsic
def store_int32(typingctx, address, value):
    """Store a shared int32 atomically; earlier stores are not moved after it."""

    def codegen(context, builder, signature, values):
        value = builder.trunc(values[1], HALF_WORD)
        builder.store_atomic(value, _pointer(builder, values[0], HALF_WORD), "release", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def fetch_add(typingctx, address, value):
    """Add to a shared word atomically and return its previous value."""

    def codegen(context, builder, signature, values):
        return builder.atomic_rmw("add", _pointer(builder, values[0]), values[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def compare_exchange(typingctx, address, before, after):
    """Replace a shared word if it equals `before`, atomically; return whether it did."""

    def codegen(context, builder, signature, values):
        found = builder.cmpxchg(_pointer(builder, values[0]), values[1], values[2], "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    """Execute the processor's spin-wait hint."""
    on_arm = platform.machine() in ("aarch64", "arm64")
    name, given = ("llvm.aarch64.isb", [ir.Constant(HALF_WORD, 15)]) if on_arm else ("llvm.x86.sse2.pause", [])

    def codegen(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [each.type for each in given])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), given)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call_libc(typingctx, function, first, second, third):
    """Call the libc function at an address with three words; functions of fewer arguments ignore the rest."""

    def codegen(context, builder, signature, values):
        kind = ir.FunctionType(HALF_WORD, [WORD] * 3)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def read_libc(typingctx, function, first, second, third, fourth):
    """Call the libc function at an address with four words and return the word that it returns."""

    def codegen(context, builder, signature, values):
        kind = ir.FunctionType(WORD, [WORD] * 4)
        return builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])

    return types.int64(*[types.int64] * 5), codegen
