"""Emulation of the expert kernels for one and several tokens on numpy, on top of `ptx.Machine`."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from auraflux.ops.moe.cuda.gemm import persistent as gemm_persistent
from auraflux.ops.moe.cuda.matvec import tma as matvec_tma
from auraflux.ops.moe.cuda.matvec.few_tokens import up_slots
from auraflux.ops.moe.cuda.matvec.few_tokens_down import down_slots
from auraflux.ops.moe.cuda.routing import assign as routing_assign
from auraflux.ops.moe.cuda.routing import topk as routing_topk
from auraflux.ops.moe.cuda.routing.topk import CHOOSE
from auraflux.ops.moe.cuda.stacks import StackArgs
from auraflux.quant import QTensor
from tests.emulator.ptx import Address, Device, Lanes, Machine
from tests.emulator.rebind import rebound
from tests.emulator.threads import BF16, Narrow, narrow, widen

KINDS = {torch.bfloat16: BF16, torch.int32: np.int32, torch.float32: np.float32}
ASIDE = ("mbarrier", "AGAIN", "SKIP", "@p mbarrier", "@p fence", "@p bra", "@!p bra")


class Typed(Address):
    """Addresses of elements of one dtype."""

    def __init__(self, at: Any, size: int, kind: Any):
        super().__init__(at, size)
        self.kind, self.dtype = kind, SimpleNamespace(element_ty=kind)

    def __add__(self, other: Any) -> "Typed":
        return Typed(self.at + np.asarray(other, np.int64) * self.size, self.size, self.kind)


def placed(device: Device, tensor: torch.Tensor | None) -> Typed | None:
    address = device.put(tensor)
    return None if address is None or tensor is None else Typed(address.at, address.size, KINDS[tensor.dtype])


def passed(device: Device, stack: QTensor | None) -> StackArgs | None:
    """Return a stack or a shared expert's weight as kernels take it, copied to the device."""
    if stack is None:
        return None
    arrays = [placed(device, each) for each in (stack.packed, stack.scales, stack.biases)]
    return StackArgs(*arrays, stack.packed.stride(0), stack.scales.stride(0))  # type: ignore[arg-type]


def pairs_fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    found = np.zeros_like(a)
    for shift in (0, 16):
        x, y, z = (widen((v >> shift & 0xFFFF).astype(np.uint16)).astype(np.float64) for v in (a, b, c))
        found |= narrow((x * y + z).astype(np.float32)).astype(np.int64) << shift
    return found


class SlotMachine(Machine):
    """Adds typed memory, shuffles and votes, and TMA, whose copies complete when requested."""

    def __init__(self, device: Device, warps: int, programs: int, *ids: int):
        super().__init__(device, warps, *ids)
        self.programs = programs

    def num_programs(self, axis: int) -> Lanes:
        return np.full(1, self.programs, np.int32).view(Lanes)

    def program_id(self, axis: int) -> Lanes:
        return np.full(1, self.ids[axis], np.int32).view(Lanes)

    @staticmethod
    def where(choice: Any, a: Any, b: Any) -> Any:
        if isinstance(a, Typed):
            return Typed(np.where(choice, a.at, b.at), a.size, a.kind)
        return Machine.where(choice, a, b)

    def load(self, source: Typed, mask: Any = True, other: Any = 0) -> Any:  # type: ignore[override]
        at, seen = np.broadcast_arrays(source.at, np.asarray(mask))
        self.device.check(at[seen], source.size)
        raw = np.ascontiguousarray(self.device.bytes[np.where(seen, at, 0)[:, None] + np.arange(source.size)])
        if source.kind == BF16:
            return narrow(np.where(seen, widen(raw.view(np.uint16)[:, 0]), np.float32(other))).view(Narrow)
        return np.where(seen, raw.view(source.kind)[:, 0], np.asarray(other, source.kind)).view(Lanes)

    def store(self, to: Typed, value: Any, mask: Any = True) -> None:  # type: ignore[override]
        at, bits, seen = np.broadcast_arrays(to.at, np.asarray(value), np.asarray(mask))
        bits = np.ascontiguousarray(bits[seen])
        if to.kind is np.int32:
            bits = bits.astype(np.int32)
        assert bits.itemsize == to.size
        self.device.check(at[seen], to.size)
        self.device.bytes[at[seen][:, None] + np.arange(to.size)] = bits[:, None].view(np.uint8)

    def inline_asm_elementwise(self, text: str, registers: str, args: Any, dtype: Any, is_pure: bool, pack: int) -> Any:
        if text in CHOOSE:
            return self._chosen(*args)
        return super().inline_asm_elementwise(text, registers, args, dtype, is_pure, pack)

    def _chosen(self, aside: Any, lane: Any, last: Any, *keys: Any) -> Lanes:
        """Return the result of the loop of `CHOOSE` in converged warps: the n-th highest key in lane n up to the last slot."""
        found, slots = np.zeros((self.count // 32, 32), np.int32), int(np.ravel(last)[0]) + 1
        every = np.concatenate([np.broadcast_to(np.asarray(key), self.count).reshape(-1, 32) for key in keys], 1)
        found[:, :slots] = np.sort(every, 1)[:, ::-1][:, :slots]
        found[np.broadcast_to(np.asarray(aside), self.count).reshape(-1, 32) != 0] = 0
        return found.reshape(-1).view(Lanes)

    def _do(self, statement: str, held: dict[str, np.ndarray]) -> None:
        if statement.startswith(ASIDE):
            return
        bare = statement.removeprefix("@p ")
        seen = np.full(self.count, True) if bare == statement else held["p"].astype(bool)
        op, _, rest = bare.partition(" ")
        parts = [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,]+", rest)]
        if op.startswith("cp.async.bulk"):
            self._fetch(*(self._place(part, held) for part in parts[:2]), self._value(parts[2], held), ~held["p"].astype(bool))
        elif op == "vote.sync.ballot.b32":
            votes = held[parts[1]].reshape(-1, 32).astype(np.int64) << np.arange(32)
            held[parts[0]] = np.repeat(votes.sum(1), 32)
        elif op == "popc.b32":
            held[parts[0]] = np.array([int(word).bit_count() for word in self._value(parts[1], held)])
        elif op == "setp.eq.b32":
            held[parts[0]] = self._value(parts[1], held) == self._value(parts[2], held)
        elif op == "fma.rn.bf16x2":
            held[parts[0]] = pairs_fused(*(self._value(part, held) for part in parts[1:]))
        elif op == "st.shared.b64":
            value = np.ascontiguousarray(self._value(parts[1], held)[seen])
            self.memory[self._place(parts[0], held)[seen][:, None] + np.arange(8)] = value[:, None].view(np.uint8)
        else:
            super()._do(statement, held)

    def _fetch(self, to: np.ndarray, source: np.ndarray, nbytes: np.ndarray, seen: np.ndarray) -> None:
        for i in np.nonzero(seen)[0]:
            assert not (to[i] | source[i] | nbytes[i]) % 16
            self.device.check(source[i : i + 1], int(nbytes[i]))
            assert to[i] + nbytes[i] <= self.memory.size
            self.memory[to[i] : to[i] + nbytes[i]] = self.device.bytes[source[i] : source[i] + nbytes[i]]


def over_warp(function: Any) -> Any:
    return lambda x: np.repeat(function(x.reshape(-1, 32), 1), 32).astype(x.dtype).view(Lanes)


def common(machine: SlotMachine) -> dict[str, Any]:
    """Return stand-ins for the functions that the kernels share."""

    def choose(*args: Any) -> Any:
        inside = rebound(routing_topk.choose, machine, highest=over_warp(np.max), lowest=over_warp(np.min))
        return inside(*args[:4], int(np.ravel(args[4])[0]), *args[5:])

    return {"choose": choose}


def slot_kernels(device: Device, warps: int, programs: int, *ids: int, early: bool = True) -> dict[str, Any]:
    """Return the kernels of `moe.cuda.slots` for one program.

    early  of a GPU with TMA and programmatic dependent launch
    """
    machine = SlotMachine(device, warps, programs, *ids)
    return {
        kernel.__name__: machine.program(kernel, **common(machine), launches_early=lambda: early)
        for kernel in (up_slots, down_slots)
    }


class BlockMachine(SlotMachine):
    """Adds counters shared by threads and programs."""

    def atomic_increment(self, at: Any, there: Any) -> Lanes:
        before = np.zeros(self.count, np.int32)
        for i in np.nonzero(np.broadcast_to(np.asarray(there), self.count))[0]:
            word = self.memory[at[i] : at[i] + 4].view(np.int32)
            before[i] = word[0]
            word += 1
        return before.view(Lanes)

    def put_word(self, at: Any, value: Any) -> None:
        words = np.ascontiguousarray(np.broadcast_to(np.asarray(value), self.count).astype(np.int32))
        self.memory[np.asarray(at)[:, None] + np.arange(4)] = words[:, None].view(np.uint8)

    def inclusive_scan(self, value: Any) -> Lanes:
        return np.cumsum(value.reshape(-1, 32), 1).astype(np.int32).reshape(-1).view(Lanes)

    def count_stage(self, at: Typed, lane: Any) -> None:
        for place in at.at[np.broadcast_to(np.asarray(lane), self.count) == 0]:
            self.device.bytes[place : place + 4].view(np.int32)[:] += 1

    def await_stages(self, at: Typed, count: Any) -> None:
        """Check that the data has arrived: programs run one after the other."""
        assert self.device.bytes[at.at[0] : at.at[0] + 4].view(np.int32)[0] == np.ravel(count)[0]


def block_kernels(device: Device, warps: int, programs: int, *ids: int) -> dict[str, Any]:
    """Return the kernels of `moe.cuda.assign` and `moe.cuda.persistent` for one program."""
    machine = BlockMachine(device, warps, programs, *ids)
    parts = {name: getattr(machine, name) for name in ("atomic_increment", "put_word", "inclusive_scan")}
    parts |= {"_count_stage": machine.count_stage, "_await_stages": machine.await_stages, **common(machine)}
    kernels = routing_assign.assign_pairs, gemm_persistent.up_stream, gemm_persistent.down_stream
    return {kernel.__name__: machine.program(kernel, **parts) for kernel in kernels}


class RingMachine(SlotMachine):
    """Adds counters and selections shared by warps."""

    def count_read(self, at: Any, lane: Any, there: Any) -> Lanes:
        at, there = (np.broadcast_to(np.asarray(value), self.count).reshape(-1, 32)[:, 0] for value in (at, there))
        before = np.full((self.count // 32, 32), -1, np.int32)
        for warp in np.nonzero(there)[0]:
            word = self.memory[at[warp] : at[warp] + 4].view(np.int32)
            before[warp] = word[0]
            word += 1
        return before.reshape(-1).view(Lanes)

    def _keys(self, key: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(key), self.count).reshape(-1, 32).astype(np.int64)

    def best(self, key: Any, warp: Any, lane: Any, warps: int, count: int) -> tuple[Lanes, Lanes]:
        keys, there = self._keys(key), min(self.count // 32, warps)
        top, who = np.full(keys.shape, -(2**31), np.int32), np.zeros(keys.shape, np.int32)
        order = np.argsort(-keys[:there], 1, kind="stable")[:, :count]
        top[:there, :count], who[:there, :count] = np.take_along_axis(keys[:there], order, 1), order
        return top.reshape(-1).view(Lanes), who.reshape(-1).view(Lanes)

    def best_lanes(self, key: Any, warp: Any, lane: Any, count: int) -> Lanes:
        found = np.zeros(self.count, np.int32)
        found[np.argsort(-self._keys(key)[0], kind="stable")[:count]] = 1
        return found.view(Lanes)

    def merged(self, at: Any, warp: Any, lane: Any, there: Any, live: Any, count: int) -> Lanes:
        listed = []
        for i in np.nonzero(np.broadcast_to(np.asarray(there), self.count)[:32])[0]:
            pairs = self.memory[at[i] : at[i] + 8 * count].view(np.int32).reshape(-1, 2)
            counts = bool(np.broadcast_to(np.asarray(live), self.count)[i])
            lowest = -2139095041  # -inf
            listed += [(-int(key), 32 * i + who) if counts else (-lowest, 32 * i + n) for n, (key, who) in enumerate(pairs)]
        found = np.zeros(self.count, np.int32)
        found[:count] = [expert for _, expert in sorted(listed, key=lambda pair: pair[0])[:count]]
        return found.view(Lanes)


def ring_kernels(device: Device, warps: int, programs: int, *ids: int) -> dict[str, Any]:
    """Return the kernels of `moe.cuda.matvec_tma` for one program."""
    machine = RingMachine(device, warps, programs, *ids)
    parts = {
        "_best": machine.best,
        "_best_lanes": machine.best_lanes,
        "_merged": machine.merged,
        "count_read": machine.count_read,
    }
    parts |= {"await_stage": lambda *args: None, **common(machine)}
    return {kernel.__name__: machine.program(kernel, **parts) for kernel in (matvec_tma.up_ring, matvec_tma.down_ring)}
