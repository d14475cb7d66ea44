"""Op calls as launch plans: Python's work for one call serves all later calls of the same signature.

Python takes ten times as long as a small kernel to check arguments, choose a route and compute sizes, with the same outcome in
every layer of a model. So a call is recorded, as steps are (`record.py`), and its launches become a `LaunchPlan` in which
addresses are relocatable. A plan is trusted once a second call gave the same. A signature covers all that argument checks look
at, so no call of a trusted plan can be refused.

Each replay repeats the queries about the contents of its arguments (`jit.Query`, `jit.error_flag`). A call with other answers
runs its Python, and so does an op whose Python reads values. Decode steps that are not recorded as a whole gain most: 1.3x with
a mixture of experts, 2.2x with a model of 135M weights. Prefill gains only where a chunk length recurs.
"""

import weakref
from collections.abc import Callable
from typing import Any

import numba

from auraflux.ops.simd import jit
from auraflux.ops.simd.compile.cache_folder import our_cache
from auraflux.ops.simd.compile.compiler import KernelCompiler
from auraflux.ops.simd.jit import arguments, int32s, int64s, scratch
from auraflux.ops.simd.replay.call_signature import Signature, Uncacheable, describe, holders
from auraflux.ops.simd.replay.launch_plan import CallRecording, Form, LaunchPlan
from auraflux.ops.simd.replay.record import watched
from auraflux.ops.simd.threads import launch_jobs, run_job, thread_pool

MAX_ENTRIES = 1024  # per op
MAX_TRIES = 32  # recordings per signature; a plan that changes every time is abandoned
SIZES = 7  # words in the header of a plan's table
SEEN, UNCACHEABLE = True, False  # entries without a plan; the first call of a signature compiles its kernels


with our_cache():

    @numba.njit(nogil=True, cache=True, pipeline_class=KernelCompiler)
    def replay(shared, table_at, space):
        """Repeat the launches of a plan; return 0, or 1 where the call must run its Python.

        space  scratch memory, which begins with the addresses of arguments and results
        table  sizes, words, [word, owner, offset] of addresses among them, [owner, offset, value] of numbers that Python read,
               [code, arguments, answer, rough answer] of queries, [code, arguments, jobs] of launches, [launches before,
               place] of numbers that are 0 unless a kernel was given bad input: later launches must not run then
        """
        first, count, moved, values, queries, launches, expected = arguments(table_at, SIZES)
        at = table_at + 8 * SIZES
        source, given, words = int64s(at, count), int64s(space, first // 8), int64s(space + first, count)
        for i in range(count):
            words[i] = source[i]
        at += 8 * count
        for _ in range(moved):
            each = int64s(at, 3)
            words[each[0]] = (space if each[1] < 0 else given[each[1]]) + each[2]
            at += 24
        for _ in range(values):
            each = int64s(at, 3)
            if int32s(given[each[0]] + each[1], 1)[0] != each[2]:
                return 1
            at += 24
        for _ in range(queries):
            each = int64s(at, 4)
            run_job(each[0], space + each[1], 0, 1)
            answer = int64s(space + each[2], 1)[0]
            bits = min(answer, 0)
            while answer > 0:
                bits += 1
                answer >>= 1
            # a plan for more tokens serves fewer
            if bits > each[3] or (bits < 0 and bits != each[3]):
                return 1
            at += 32
        looked, seen = at + 24 * launches, 0
        for number in range(launches + 1):
            while seen < expected and (number == launches or int64s(looked, 1)[0] <= number):
                if int64s(space + int64s(looked, 2)[1], 1)[0] != 0:
                    return 1
                looked += 16
                seen += 1
            if number < launches:
                each = int64s(at, 3)
                launch_jobs(shared, each[0], space + each[1], each[2])
                at += 24
        return 0


class CallCache:
    """The launch plans of one op's CPU calls.

    run  checks the arguments of a call and runs its Python
    """

    def __init__(self, run: Callable[..., Any]):
        self.run = run
        self.entries: dict[Signature, LaunchPlan | bool] = {}

    def __call__(self, args: tuple[Any, ...], activation_bits: int) -> Any:
        """Replay a call where a plan serves it; otherwise run its Python."""
        key: list[Any] = [activation_bits, thread_pool.count]
        addresses: list[int] = []
        try:
            describe(args, key, addresses)
        # tensors without strides or memory, and objects that no op takes, raise the others
        except (Uncacheable, AttributeError, RuntimeError, TypeError, ValueError):
            return self.run(*args)
        signature = tuple(key)
        entry = self.entries.get(signature)
        if entry is UNCACHEABLE or jit.dry_run is not None:
            return self.run(*args)
        if entry is None:
            return self._first(args, signature)
        if isinstance(entry, LaunchPlan) and entry.trusted and (not entry.pins or _shared_pins(entry, args) == entry.pins):
            outs = [make() for make in entry.make]
            if entry.nbytes > scratch.nbytes:
                scratch.grow(entry.nbytes)
            entry.write(scratch.view, 0, *addresses, *[out.data_ptr() for out in outs])
            if not replay(thread_pool.shared, entry.table_at, scratch.address):
                return _result(entry.form, (*args, *outs))
        return self._record(args, signature, addresses)

    def _first(self, args: tuple[Any, ...], signature: Signature) -> Any:
        """Run the first call of a signature."""
        result = self.run(*args)
        if len(self.entries) >= MAX_ENTRIES:
            self.entries.clear()
        self.entries[signature] = SEEN
        return result

    def _record(self, args: tuple[Any, ...], signature: Signature, addresses: list[int]) -> Any:
        """Record a call, and trust the plan of an earlier call if this one gives the same."""
        recording = CallRecording()
        with watched(recording):
            result = self.run(*args)
        known = self.entries.get(signature)
        try:
            plan = recording.plan(args, addresses, result)
        except Uncacheable:
            self.entries[signature] = UNCACHEABLE
            return result
        if isinstance(known, LaunchPlan) and known.content == plan.content:
            known.pins, known.trusted = _shared_pins(known, args), True
            return result
        plan.pins = {position: weakref.ref(each) for position, each in enumerate(holders(args))}
        plan.tries += known.tries if isinstance(known, LaunchPlan) else 0
        self.entries[signature] = plan if plan.tries <= MAX_TRIES else UNCACHEABLE
        return result


def _shared_pins(plan: LaunchPlan, args: tuple[Any, ...]) -> dict[int, weakref.ref[Any]]:
    """Return the pins of a plan that a call shares."""
    tensor_args = holders(args)
    return {position: pin for position, pin in plan.pins.items() if pin() is tensor_args[position]}


def _result(form: Form, values: tuple[Any, ...]) -> Any:
    """Assemble a result from arguments and new tensors."""
    if type(form) is int:
        return values[form]
    return None if form is None else tuple([_result(each, values) for each in form])


def warm_up() -> None:
    """Compile `replay` before its first call."""
    replay.compile((numba.types.int64,) * 3)
