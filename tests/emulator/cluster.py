"""PTX on numpy for the programs of a cluster in lockstep: each has its own shared memory, to which the others may write.

As in `ptx.py`, barriers do nothing: programs advance together, so that a value is there when another program reads it.
"""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.emulator.ptx import IGNORED, Device, Lanes, Machine, bits_of, floats
from tests.emulator.threads import widen

SHARED_NBYTES = 227 << 10
STRIDE = 1 << 18  # bytes between the shared memories of two programs
NO_OPS = ("barrier.cluster", "fence.proxy", "wgmma.fence", "wgmma.commit", "wgmma.wait", *IGNORED)
WIDE = {"cvt.u64.u32": lambda a: a, "or.b64": lambda a, b: a | b, "add.s64": lambda a, b: a + b}


class Cluster(Machine):
    """`gl` for the programs of a cluster."""

    def __init__(self, device: Device, warps: int, programs: int, *ids: int):
        super().__init__(device, warps * programs, *ids)
        self.each, self.memory = 32 * warps, np.full(STRIDE * programs, 0xFF, np.uint8)

    def room(self, nbytes: int, tid: Lanes, programs: int) -> tuple[Any, Lanes]:
        assert nbytes <= SHARED_NBYTES
        return SimpleNamespace(_keep_alive=lambda: None), (np.arange(self.count, dtype=np.int32) // self.each * STRIDE).view(
            Lanes
        )

    def _do(self, statement: str, held: dict[str, np.ndarray]) -> None:
        op, _, rest = statement.partition(" ")
        parts = [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,]+", rest)]
        if statement.startswith(NO_OPS):
            return
        if op in WIDE:
            held[parts[0]] = WIDE[op](*(self._value(part, held) for part in parts[1:]))
        elif op == "setp.ne.u32":
            held[parts[0]] = self._value(parts[1], held) != self._value(parts[2], held)
        elif op == "mapa.shared::cluster.u32":
            at, rank = (self._value(part, held) for part in parts[1:])
            assert (rank < self.count // self.each).all()
            held[parts[0]] = at % STRIDE + rank * STRIDE
        elif op.startswith("wgmma.mma_async"):
            self._multiply_wide(*parts, held=held)
        else:
            super()._do(statement, held)

    def _multiply_wide(self, d: str, a: str, where: str, accumulate: str, *signs: str, held: dict[str, np.ndarray]) -> None:
        """Multiply a warp's 16 rows, in registers as `_multiply` has them, by tokens in shared memory."""
        assert signs == ("1", "1", "0")
        sums, left = d.strip("{}").split(","), np.zeros((self.count // 32, 16, 16))
        for i, name in enumerate(a.strip("{}").split(",")):
            for k in (0, 1):
                half = widen((held[name] >> 16 * k & 0xFFFF).astype(np.uint16))
                left[:, i % 2 * 8 :, i // 2 * 8 + k :: 2][:, :8, :4] = half.reshape(-1, 8, 4)
        n, k = np.arange(2 * len(sums))[:, None], np.arange(16)[None, :]
        for name in sums:
            held[name] = held[name].copy() if name in held else np.zeros(self.count, np.int64)
        for warp in range(self.count // 32):
            mine = slice(32 * warp, 32 * warp + 32)
            (matrix,) = {int(value) for value in held[where][mine]}
            at, along, across = ((matrix >> place & 0x3FFF) << 4 for place in (0, 16, 32))
            at += warp * 32 // self.each * STRIDE
            place = at + n // 8 * across + n % 8 * 16 + k // 8 * along + k % 8 * 2
            bits = self.memory[place].astype(np.uint16) | self.memory[place + 1].astype(np.uint16) << 8
            out = left[warp] @ widen(bits).T.astype(np.float64)
            for i, name in enumerate(sums):
                found = out[i % 4 // 2 * 8 :, i // 4 * 8 + i % 2 :][:8, :8:2].reshape(-1)
                old = floats(held[name][mine]) if held[accumulate][mine].all() else 0
                held[name][mine] = bits_of((old + found).astype(np.float32))


def run_cluster(device: Device, warps: int, programs: int, ids: tuple[int, ...], kernel: Any, args: Any) -> None:
    """Run one cluster of a kernel."""
    machine = Cluster(device, warps, programs, *ids)
    machine.program(kernel, room=machine.room, threads=lambda warps, programs: None)(*args)
