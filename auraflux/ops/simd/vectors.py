"""Vector code in Numba, emitted as LLVM IR.

Loops compiled by Numba do not reach the byte dot-product instructions, so the inner loops of quantized kernels emit IR with
llvmlite: generic vector operations are here, operations that differ between processors in `isa.ISA`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from auraflux.ops.simd.processor import LINE

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()

# 1.5 * 2**23: its bits plus n are the float 12582912 + n for |n| < 2**22, so that sums of integers started there become floats
# by one subtraction, and adding it to a float rounds that to an integer in the low bits
MAGIC, MAGIC_BITS = 12582912.0, 0x4B400000


def vector(kind: ir.Type, count: int) -> ir.VectorType:
    return ir.VectorType(kind, count)


def at(n: int) -> ir.Constant:
    return ir.Constant(I64, n)


def splat(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def call(b: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    """Call an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)


def load(b: ir.IRBuilder, address: ir.Value, offset: ir.Value | int, kind: ir.Type) -> ir.Value:
    """Load from an integer address and a byte offset, aligned or not."""
    where = b.add(address, at(offset) if isinstance(offset, int) else offset)
    return b.load(b.inttoptr(where, kind.as_pointer()), align=1)


def store(b: ir.IRBuilder, value: ir.Value, address: ir.Value, offset: ir.Value | int) -> None:
    where = b.add(address, at(offset) if isinstance(offset, int) else offset)
    b.store(value, b.inttoptr(where, value.type.as_pointer()), align=1)


def spread(b: ir.IRBuilder, scalar: ir.Value, count: int) -> ir.Value:
    """Broadcast a scalar to every lane of a vector."""
    kind = vector(scalar.type, count)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(vector(I32, count), [0] * count))


def pick(b: ir.IRBuilder, x: ir.Value, y: ir.Value, lanes: list[int]) -> ir.Value:
    return b.shuffle_vector(x, y, ir.Constant(vector(I32, len(lanes)), lanes))


def fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    return call(b, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)


def prefetch(b: ir.IRBuilder, addresses: list[ir.Value], nbytes: ir.Value | int) -> None:
    """Prefetch the cache lines of `nbytes` bytes from each address on; invalid addresses are harmless."""
    for_reading, high_locality, data = (ir.Constant(I32, n) for n in (0, 3, 1))

    def prefetch_line(offset: ir.Value) -> None:
        for address in addresses:
            pointer = b.inttoptr(b.add(address, offset), I8.as_pointer())
            call(b, "llvm.prefetch.p0", ir.VoidType(), pointer, for_reading, high_locality, data)

    if isinstance(nbytes, int):
        for offset in range(0, nbytes, LINE):
            prefetch_line(at(offset))
        return
    with cgutils.for_range(b, b.sdiv(b.add(nbytes, at(LINE - 1)), at(LINE))) as loop:
        prefetch_line(b.mul(loop.index, at(LINE)))


def sum_four(b: ir.IRBuilder, rows: list[ir.Value]) -> ir.Value:
    """Sum across the lanes of four vectors, into one vector of four."""
    total = _add_neighbours(b, _add_neighbours(b, *rows[:2]), _add_neighbours(b, *rows[2:]))
    while total.type.count > 4:
        half = total.type.count // 2
        total = b.fadd(pick(b, total, total, list(range(half))), pick(b, total, total, list(range(half, 2 * half))))
    return total


def _add_neighbours(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    # within 128 bits, where shuffles are cheap on x86 and ARM has a single instruction
    lanes = x.type.count
    even = [n for first in range(0, lanes, 4) for n in (first, first + 2, lanes + first, lanes + first + 2)]
    return b.fadd(pick(b, x, y, even), pick(b, x, y, [n + 1 for n in even]))


def variable(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return a mutable variable that LLVM places in a register, initialised each time control passes this point."""
    slot = cgutils.alloca_once(b, value.type)
    b.store(value, slot)
    return slot


class StrictBuilder:
    """An IR builder whose arithmetic is neither reordered nor contracted, wherever it is inlined.

    Numba adds its fast-math flags to all arithmetic that has none, also inside intrinsics. So each instruction gets one flag
    that affects only the sign of zero.
    """

    FLAGS = ("nsz",)

    def __init__(self, b: ir.IRBuilder):
        self._b = b

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._b, name)
        return partial(found, flags=self.FLAGS) if name in ("fadd", "fsub", "fmul", "fdiv") else found


def kernel(constants: int, outlined: bool = False) -> Callable[[Callable[..., None]], Any]:
    """Make `build(b, *constants, *values)` callable from jitted code.

    The result is called with one tuple. Its first `constants` entries must be compile-time integers or strings (globals or
    closure variables) and reach `build` as Python values; the rest arrive as IR values, nested tuples flattened.

    outlined  emit a function that is not inlined, which shortens compilation: for loops long enough to repay a call
    """

    def wrap(build: Callable[..., None]) -> Any:
        @intrinsic(prefer_literal=True)
        def emit(typingctx, args):
            fixed = [t.literal_value for t in args.types[:constants]]

            def codegen(context, b, signature, values):
                entries = list(zip(args.types, cgutils.unpack_tuple(b, values[0]), strict=True))[constants:]
                opened = [v for kind, value in entries for v in (cgutils.unpack_tuple(b, value) if is_tuple(kind) else [value])]
                if outlined:
                    b.call(_function(b.module, build, fixed, [each.type for each in opened]), opened)
                else:
                    build(StrictBuilder(b), *fixed, *opened)
                return context.get_dummy_value()

            return types.void(args), codegen

        made: Any = emit
        # for tests and tools that compile without Numba
        made.build = build
        return made

    return wrap


def _function(module: ir.Module, build: Callable[..., None], fixed: list[Any], kinds: list[ir.Type]) -> ir.Function:
    """Return the module's function that `build` emits for these constants; emit it at the first use."""
    name = f"{build.__module__}.{build.__qualname__} {fixed}"
    if name not in module.globals:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        b = ir.IRBuilder(function.append_basic_block())
        build(StrictBuilder(b), *fixed, *function.args)
        b.ret_void()
    return module.globals[name]


@kernel(constants=0)
def copy(b: ir.IRBuilder, source: ir.Value, nbytes: ir.Value, target: ir.Value) -> None:
    """Copy bytes between buffers that do not overlap."""
    here, there = (b.inttoptr(address, I8.as_pointer()) for address in (source, target))
    call(b, "llvm.memcpy.p0.p0.i64", ir.VoidType(), there, here, nbytes, ir.Constant(ir.IntType(1), 0))


def is_tuple(kind: types.Type) -> bool:
    return isinstance(kind, types.BaseTuple)
