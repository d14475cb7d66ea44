"""Calls of ops as lists of launches, made again for other memory: what Python finds out for one call serves all like it.

Python takes ten times as long as a small kernel to check arguments, choose a route and work out sizes, and comes to the same
for all layers of a model. So a call is recorded, as steps are (`record.py`), and every number its kernels are given is told
apart: the address of an argument, of a result or of scratch memory and a distance from there, or a number that stays. That is
a `Plan`. It is trusted once another call, with other addresses, has had the same. Calls are alike that have arguments of the
same types, dtypes, shapes and strides, and equal numbers; so what one is refused for, none of a plan's calls can be.

What kernels are asked about the content of arguments (`jit.Question`, `jit.wrong`) is asked again by each call. A call whose
answers are others, and one of which Python reads values, runs its Python.
"""

import weakref
from typing import Any

import numba

from auraflux.ops._dispatch import Op, _exact
from auraflux.ops.routes import is_rerouted
from auraflux.ops.simd import jit
from auraflux.ops.simd.alike import Key, Unlike, describe, holders
from auraflux.ops.simd.compiler import KernelCompiler
from auraflux.ops.simd.folder import our_cache
from auraflux.ops.simd.jit import arguments, int32s, int64s, scratch
from auraflux.ops.simd.plans import CallRecording, Plan
from auraflux.ops.simd.record import watched
from auraflux.ops.simd.threads import crew, launch_jobs, run_job

MOST_PLANS = 1024  # of an op
MOST_TRIES = 32  # recordings of calls that are alike; where plans differ so often there is no use
SIZES = 7  # numbers that a plan's table begins with


with our_cache():

    @numba.njit(nogil=True, cache=True, pipeline_class=KernelCompiler)
    def play(shared, table_at, space):
        """Make the launches of a plan; gives 0, or another number where the call must run its Python.

        space  scratch memory, which begins with the addresses of arguments and results
        table  sizes, words, [word, whose, distance] of addresses among them, [whose, distance, value] of what was read,
               [code, arguments, answer, roughly] of questions, [code, arguments, jobs] of launches, [launches before, place]
               of what is 0 unless a kernel has found something wrong: those after it would read what is not there
        """
        first, count, moved, values, questions, launches, expected = arguments(table_at, SIZES)
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
        for _ in range(questions):
            each = int64s(at, 4)
            run_job(each[0], space + each[1], 0, 1)
            answer = int64s(space + each[2], 1)[0]
            bits = min(answer, 0)
            while answer > 0:
                bits += 1
                answer >>= 1
            # what serves many serves few
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


class Prepared:
    """The plans of one op's calls."""

    def __init__(self, op: Op):
        self.run = op.run
        self._plans: dict[Key, Plan] = {}
        # not trusted yet; None after the first call of a kind, which compiles what it needs; False where there can be no plan
        self._others: dict[Key, Plan | bool | None] = {}

    def __call__(self, args: tuple[Any, ...]) -> Any:
        key: list[Any] = [_exact.get(), crew.count]
        addresses: list[int] = []
        try:
            describe(args, key, addresses)
        # of tensors without strides or memory, and of what is no argument of an op, too
        except (Unlike, AttributeError, RuntimeError, TypeError, ValueError):
            return self.run(*args)
        alike = tuple(key)
        plan = self._plans.get(alike)
        if plan is None:
            return self._consider(args, alike, addresses)
        if jit.notes is not None or is_rerouted():
            return self.run(*args)
        if plan.pins and _shared_pins(plan, args) != plan.pins:
            return self._record(args, alike, addresses, plan)
        count, outs = len(addresses), [make() for make in plan.make]
        for out in outs:
            addresses.append(out.data_ptr())
        if plan.nbytes > scratch.nbytes:
            scratch.grow(plan.nbytes)
        plan.write(scratch.view, 0, *addresses)
        if play(crew.shared, plan.at, scratch.address):
            return self._record(args, alike, addresses[:count], plan)
        return plan.give(args, outs)

    def _consider(self, args: tuple[Any, ...], alike: Key, addresses: list[int]) -> Any:
        """Run the Python of a call for which there is no plan, and see whether there can be one."""
        if jit.notes is not None or is_rerouted():
            return self.run(*args)
        if alike in self._others:
            known = self._others[alike]
            return self.run(*args) if known is False else self._record(args, alike, addresses, known)
        result = self.run(*args)
        if len(self._others) + len(self._plans) >= MOST_PLANS:
            self._others.clear()
            self._plans.clear()
        self._others[alike] = None
        return result

    def _record(self, args: tuple[Any, ...], alike: Key, addresses: list[int], known: Plan | bool | None) -> Any:
        """Run the Python of a call, and trust a plan that this call has had too."""
        recording = CallRecording()
        with watched(recording):
            result = self.run(*args)
        self._plans.pop(alike, None)
        try:
            plan = recording.plan(args, addresses, result)
            if isinstance(known, Plan) and known.same(plan):
                known.pins = _shared_pins(known, args)
                self._plans[alike] = known
                return result
            plan.tries += known.tries if isinstance(known, Plan) else 0
            if plan.tries > MOST_TRIES:
                raise Unlike
        except Unlike:
            self._others[alike] = False
            return result
        plan.pins = {number: weakref.ref(each) for number, each in enumerate(holders(args))}
        self._others[alike] = plan
        return result


def _shared_pins(plan: Plan, args: tuple[Any, ...]) -> dict[int, weakref.ref[Any]]:
    """The pins of a plan that a call has too."""
    held = holders(args)
    return {number: pin for number, pin in plan.pins.items() if pin() is held[number]}


def make_ready() -> None:
    """Have the code that makes launches before it is needed."""
    play.compile((numba.types.int64,) * 3)
