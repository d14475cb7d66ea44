"""Compiled loops of one number of bits each: a cache has one for its keys and one for its values, and waits for no others."""

from functools import cache

from auraflux.ops.simd.jit import Kernel, arguments
from auraflux.ops.turboquant.cpu.int8.key_scores import key_score_loop, transpose_key_loop, transposed_score_loop
from auraflux.ops.turboquant.cpu.int8.value_sums import add_value_loop


@cache
def _key_loops(bits: int) -> tuple[Kernel, ...]:
    @Kernel
    def key_scores(args, job, jobs):
        key_score_loop((bits, arguments(args, 14)))

    @Kernel
    def transpose_keys(args, job, jobs):
        transpose_key_loop((bits, arguments(args, 5)))

    @Kernel
    def transposed_scores(args, job, jobs):
        transposed_score_loop((bits, arguments(args, 11)))

    return key_scores, transpose_keys, transposed_scores


@cache
def _value_loops(bits: int) -> tuple[Kernel, ...]:
    @Kernel
    def add_values(args, job, jobs):
        add_value_loop((bits, arguments(args, 9)))

    return (add_values,)


_known: dict[tuple[int, int], tuple[int, ...]] = {}


def loops_for(key_bits: int, value_bits: int) -> tuple[int, ...]:
    """Return the addresses of the loops for a cache's bits: key_scores, transpose_keys, transposed_scores, add_values."""
    found = _known.get((key_bits, value_bits))
    if found is None:
        found = tuple(each.address for each in (*_key_loops(key_bits), *_value_loops(value_bits)))
        if all(found):
            _known[key_bits, value_bits] = found
    return found
