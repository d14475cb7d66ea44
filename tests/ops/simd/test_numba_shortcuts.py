"""Memoised compiler steps match Numba and leave other code alone; outlined functions match inlined ones."""

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.core.compiler import run_frontend

from auraflux.ops.simd.compile import numba_shortcuts
from auraflux.ops.simd.jit import Kernel, arguments, floats, jit, strict
from auraflux.ops.simd.vectors import F32, kernel, load, splat, store, vector

RESOLVE = types.Function.get_call_type


@strict
def _in_order(x, n):
    total = np.float32(0)
    for i in range(n):
        total += max(x[i], np.float32(0))
    return total


@jit
def _in_any_order(x, n):
    total = np.float32(0)
    for i in range(n):
        total += max(x[i], np.float32(0))
    return total


@Kernel
def _both(args, job, jobs):
    x_at, n, out_at = arguments(args, 3)
    x, out = floats(x_at, n), floats(out_at, 2)
    out[0], out[1] = _in_order(x, n), _in_any_order(x, n)


def test_functions_with_other_flags_compile_separately():
    x, out = torch.randn(1000), torch.empty(2)
    _both(1, x.data_ptr(), len(x), out.data_ptr())
    in_order = np.float32(0)
    for each in x.clamp(min=0).numpy():
        in_order += each
    assert out[0] == torch.tensor(in_order)
    torch.testing.assert_close(out[1], out[0])


def test_shortcuts_do_not_affect_other_code():
    _both.compile()
    assert types.Function.get_call_type is RESOLVE
    before = len(numba_shortcuts._known)
    assert numba.njit(lambda a, b: max(a, b) + 1)(2, 5) == 6
    assert len(numba_shortcuts._known) == before


def test_cached_overloads_match_numba():
    # not cached on disk
    with numba_shortcuts.shortcuts():
        numba.njit(lambda a, b: max(a, b) * 2 - (a + b) // 3 if a < b else min(a, 7)).compile((types.int64, types.int32))
    context = numba.core.registry.cpu_target.typing_context
    checked = 0
    for (function, args, kws, _), (signature, _) in numba_shortcuts._known.items():
        if function.typing_key in (min, max) or getattr(function.typing_key, "__module__", "") == "_operator":
            assert RESOLVE(function, context, args, dict(kws)) == signature
            checked += 1
    assert checked > 3


def _some_statements(x, n):
    total = 0
    for i in range(n):
        pair = (x[i], total)
        total = max(*pair) if i else pair[0]
        x[i] = total
    return total


def test_variables_of_statements_match_numba():
    statements = [each for block in run_frontend(_some_statements).blocks.values() for each in block.body]
    expected = [each.list_vars() for each in statements]
    with numba_shortcuts.shortcuts():
        assert [each.list_vars() for each in statements] == expected
    assert sum(map(len, expected)) > len(statements)


def test_type_sizes_match_llvm():
    target = numba.core.registry.cpu_target.target_context.target_data
    kinds = [ir.IntType(8), ir.LiteralStructType([ir.IntType(8), ir.DoubleType()]), ir.ArrayType(ir.FloatType(), 3)]
    expected = [each.get_abi_size(target) for each in kinds]
    with numba_shortcuts.shortcuts():
        assert [[each.get_abi_size(target) for each in kinds] for _ in range(2)] == [expected] * 2


def _scaled(b, factor, source, offset, target):
    x = load(b, source, offset, vector(F32, 4))
    store(b, b.fmul(x, splat(x.type, factor)), target, offset)


_inlined, _outlined = kernel(constants=1)(_scaled), kernel(constants=1, outlined=True)(_scaled)
THREE, FIVE = 3, 5


@Kernel
def _both_ways(args, job, jobs):
    x, inlined, outlined = arguments(args, 3)
    _inlined((THREE, x, 0, inlined))
    _inlined((FIVE, x, 16, inlined))
    # calls with the same constants share one function
    _outlined((THREE, x, 0, outlined))
    _outlined((FIVE, x, 16, outlined))
    _outlined((THREE, x, 32, outlined))


def test_outlined_functions_match_inlined_ones():
    x, inlined, outlined = torch.randn(12), torch.zeros(8), torch.zeros(12)
    _both_ways(1, x.data_ptr(), inlined.data_ptr(), outlined.data_ptr())
    assert torch.equal(inlined, torch.cat([3 * x[:4], 5 * x[4:8]]))
    assert torch.equal(outlined, torch.cat([inlined, 3 * x[8:]]))
