"""A program's threads with everything that the functions of `ops/hopper` use: mbarriers, warp reductions, counters."""

import importlib
import re
from importlib.util import find_spec
from typing import Any

import numpy as np
from triton.runtime.jit import JITFunction

from tests.emulator.experts import SlotMachine
from tests.emulator.ptx import MASK, Device, Lanes
from tests.emulator.rebind import meaning

SHARED = ("ptx", "shared_memory", "reduce", "copy", "mma")  # by all others
REDUCTIONS = {"max.s32": np.max, "min.s32": np.min, "add.s32": np.sum, "or.b32": np.bitwise_or.reduce}


class Hopper(SlotMachine):
    """Adds mbarriers that count, branches that skip, `redux`, `shfl.up` and atomic additions."""

    segment = 1 << 10  # where the dynamic shared memory begins

    def __init__(self, device: Device | None = None, warps: int = 1):
        super().__init__(device or Device(), warps, 1, 0)
        self.barriers: dict[int, list[int]] = {}  # arrivals to come, bytes to come, how often it was complete
        self.away, self.goal = np.full(self.count, False), ""  # threads that have branched, and where to

    def lanes(self, values: Any, kind: Any = np.int32) -> Lanes:
        """Return one value per thread."""
        return np.ascontiguousarray(np.broadcast_to(np.asarray(values, kind), self.count)).view(Lanes)

    @property
    def tid(self) -> Lanes:
        return self.lanes(np.arange(self.count))

    def _do(self, statement: str, held: dict[str, np.ndarray]) -> None:
        label = re.match(r"(SKIP|DONE|AGAIN): *", statement)
        if label:
            self.away = self.away & (label[1] != self.goal)
            statement = statement[label.end() :]
        guard = re.match(r"@(!?)(\w) ", statement)
        seen, bare = ~self.away, statement
        if guard:
            seen, bare = seen & (held[guard[2]].astype(bool) ^ bool(guard[1])), statement[guard.end() :]
        op, _, rest = bare.partition(" ")
        parts = [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,]+", rest)]
        if not op or op.startswith("fence"):
            return
        if op == "bra":
            assert rest != "AGAIN" or not seen.any(), "a thread would wait forever"
            self.away, self.goal = self.away | seen, rest if seen.any() else self.goal
        elif op == "mov.u32":
            held[parts[0]] = np.full(self.count, self.segment, np.int64)
        elif op.startswith("mbarrier"):
            self._barrier(op, parts, held, seen)
        elif op.startswith("cp.async.bulk"):
            self._bulk(parts, held, seen)
        elif op.startswith("redux.sync."):
            value = self._value(parts[1], held).astype(np.uint32).view(np.int32).reshape(-1, 32)
            held[parts[0]] = np.repeat(REDUCTIONS[op[11:]](value, axis=1), 32).astype(np.int64) & MASK
        elif op == "shfl.sync.up.b32":
            (to, there), by, value = parts[0].split("|"), int(parts[2]), self._value(parts[1], held).reshape(-1, 32)
            lane = np.arange(32)
            held[to] = value[:, np.maximum(lane - by, 0)].reshape(-1)
            held[there] = np.tile(lane >= by, self.count // 32)
        elif op == "add.s32":
            total = self._value(parts[1], held) + self._value(parts[2], held) & MASK
            held[parts[0]] = np.where(seen, total, held[parts[0]])
        elif op.startswith("atom."):
            before, at = held[parts[0]].copy(), self._place(parts[1], held)
            for i in np.nonzero(seen)[0]:
                word = self.memory[at[i] : at[i] + 4].view(np.uint32)
                before[i] = word[0]
                word += np.uint32(int(parts[2]))
            held[parts[0]] = before
        else:
            super()._do(bare if label and not guard else statement, held)

    def _barrier(self, op: str, parts: list[str], held: dict[str, np.ndarray], seen: np.ndarray) -> None:
        place = self._place(next(part for part in parts if part.startswith("[")), held)
        if op.startswith("mbarrier.try_wait"):
            phases = np.array([self.barriers[at][2] if here else 1 for at, here in zip(place, seen, strict=True)])
            # a phase is over when the one under way has the other parity
            held[parts[0]] = (phases % 2 != self._value(parts[2], held)) | ~seen
            return
        for i in np.nonzero(seen)[0]:
            if op.startswith("mbarrier.init"):
                self.barriers[place[i]] = [int(parts[1]), 0, 0]
            else:
                self.barriers[place[i]][0] -= 1
                self.barriers[place[i]][1] += int(self._value(parts[2], held)[i])
                self._complete(place[i])

    def _bulk(self, parts: list[str], held: dict[str, np.ndarray], seen: np.ndarray) -> None:
        to, source, barrier = (self._place(parts[i], held) for i in (0, 1, 3))
        nbytes = self._value(parts[2], held)
        self._fetch(to, source, nbytes, seen)
        for i in np.nonzero(seen)[0]:
            self.barriers[barrier[i]][1] -= int(nbytes[i])
            self._complete(barrier[i])

    def _complete(self, at: int) -> None:
        arrivals, nbytes, phases = self.barriers[at]
        if arrivals <= 0 and nbytes == 0:
            self.barriers[at] = [1, 0, phases + 1]


def functions(machine: Hopper, *names: str) -> dict[str, Any]:
    """Return the functions of modules of `ops/hopper`, for one program."""
    made: dict[str, Any] = {}
    for name in (*SHARED, *names):
        package = "hopper" if find_spec(f"auraflux.ops.hopper.{name}") else "gpu.blocks"
        for key, value in vars(importlib.import_module(f"auraflux.ops.{package}.{name}")).items():
            made[key] = machine.program(value) if isinstance(value, JITFunction) else meaning(value, machine)
    return made
