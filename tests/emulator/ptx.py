"""PTX on numpy: the threads of one program, its shared memory, and device memory with the tensors it is given.

Triton's interpreter does not run Gluon. This runs a kernel's Python, as `threads.py` does, and its actual PTX, so that bits,
addresses and masks can be checked without a GPU. It does not see races between threads: copies complete when requested, and
barriers do nothing.
"""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.emulator.rebind import rebound
from tests.emulator.threads import Language, Values, narrow, widen

MASK = 0xFFFFFFFF
PAGE = 4096
GAP = 1 << 18  # between tensors: no 16-bit number takes a program from one to the next
MEMORY_NBYTES = 1 << 25
SHARED_NBYTES = 1 << 18
IGNORED = (".reg", "griddepcontrol", "bar.", "cp.async.commit", "cp.async.wait", "@p prefetch")


class Lanes(Values):
    """Immutable values, as Triton's are."""

    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __isub__(self, other: Any) -> Any:
        return self - other


class Address:
    """Addresses of elements in device memory."""

    def __init__(self, at: Any, size: int):
        self.at, self.size = np.asarray(at, np.int64), size

    def __add__(self, other: Any) -> "Address":
        return Address(self.at + np.asarray(other, np.int64) * self.size, self.size)

    def to(self, dtype: Any) -> Lanes:
        return self.at.view(Lanes)


class Device:
    """Memory with tensors in it; reading outside of them fails."""

    def __init__(self) -> None:
        self.bytes, self.spans, self.end = np.full(MEMORY_NBYTES, 0xFF, np.uint8), np.empty((0, 2), np.int64), PAGE

    def put(self, tensor: torch.Tensor | None) -> Address | None:
        if tensor is None:
            return None
        raw, at = tensor.view(-1).view(torch.uint8).numpy(), self.end
        self.bytes[at : at + raw.size] = raw
        # a word that begins in a tensor may end outside of it
        self.spans = np.concatenate([self.spans, [[at, at + -(-raw.size // 4) * 4]]])
        self.end = (at + raw.size) // PAGE * PAGE + GAP
        return Address([at], tensor.element_size())

    def get(self, address: Address, like: torch.Tensor) -> torch.Tensor:
        raw = self.bytes[address.at[0] : address.at[0] + like.nbytes].copy()
        return torch.from_numpy(raw).view(like.dtype).view(like.shape)

    def check(self, at: np.ndarray, nbytes: int) -> None:
        inside = (at[:, None] >= self.spans[:, 0]) & (at[:, None] + nbytes <= self.spans[:, 1])
        assert inside.any(1).all()


ONES = 0x3F803F80  # a pair of bf16


def logic(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    out = np.zeros_like(a)
    for k in range(8):
        if table[0] >> k & 1:
            out |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
    return out


def chosen_bytes(a: np.ndarray, b: np.ndarray, how: np.ndarray) -> np.ndarray:
    """Select bytes of two words; the highest bit of a digit of `how` selects the sign instead of the byte."""
    found = np.zeros_like(a)
    for k in range(4):
        digit = how >> 4 * k & 15
        octet = np.where(digit & 4, b, a) >> 8 * (digit & 3) & 255
        found = found | np.where(digit & 8, (octet >> 7) * 255, octet) << 8 * k
    return found


def larger_halves(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.maximum(a & 0xFFFF, b & 0xFFFF) | np.maximum(a >> 16, b >> 16) << 16


def larger_pairs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the bf16 numbers of larger magnitude; here without the signs that PTX gives them."""
    return larger_halves(a & 0x7FFF7FFF, b & 0x7FFF7FFF)


def pair_dot(first: int, signed: bool) -> Callable[..., np.ndarray]:
    """Multiply two 16-bit numbers by two bytes of a word from one on, and add to a number."""

    def dot(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        octets = [(b >> 8 * (first + k) & 255).astype(np.int8 if signed else np.uint8).astype(np.int64) for k in (0, 1)]
        halves = [(a >> 16 * k & 0xFFFF).astype(np.int16).astype(np.int64) for k in (0, 1)]
        return c + halves[0] * octets[0] + halves[1] * octets[1]

    return dot


def funnel(low: np.ndarray, high: np.ndarray, shift: np.ndarray) -> np.ndarray:
    wide = (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)
    return (wide >> (shift & 31).astype(np.uint64)).astype(np.int64)


def pairs_times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    halves = ([widen((v >> k & 0xFFFF).astype(np.uint16)) for v in (a, b)] for k in (0, 16))
    low, high = (narrow(x * y).astype(np.int64) for x, y in halves)
    return low | high << 16


def pairs_times_and(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    halves = [[widen((v >> k & 0xFFFF).astype(np.uint16)).astype(np.float64) for v in (a, b, c)] for k in (0, 16)]
    low, high = (narrow((x * y + z).astype(np.float32)).astype(np.int64) for x, y, z in halves)
    return low | high << 16


def floats(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def bits_of(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint32).astype(np.int64)


INSTRUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "shr.u32": lambda a, n: np.where(n > 31, 0, a >> np.minimum(n, 31)),
    "shl.b32": lambda a, n: a << n,
    "shf.r.wrap.b32": funnel,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "sub.u32": lambda a, b: a - b,
    "sub.s32": lambda a, b: a - b,
    "mad.lo.s32": lambda a, b, c: a * b + c,
    "max.u32": np.maximum,
    "max.u16x2": larger_halves,
    "max.NaN.xorsign.abs.bf16x2": larger_pairs,
    **{
        f"dp2a.{mode}.s32.{kind}": pair_dot(first, kind == "s32")
        for mode, first in (("lo", 0), ("hi", 2))
        for kind in ("s32", "u32")
    },
    "selp.b32": lambda a, b, choice: np.where(choice.astype(bool), a, b),
    "mul.lo.u32": lambda a, b: a * b,
    "mul.rn.bf16x2": pairs_times,
    "fma.rn.bf16x2": pairs_times_and,
    "add.rn.bf16x2": lambda a, b: pairs_times_and(a, np.full_like(a, ONES), b),
    "lop3.b32": logic,
    "prmt.b32": chosen_bytes,
    "cvt.u32.u16": lambda a: a,
    "cvt.f32.f16": lambda a: bits_of(a.astype(np.uint16).view(np.float16).astype(np.float32)),
    "add.f32": lambda a, b: bits_of(floats(a) + floats(b)),
    "mul.f32": lambda a, b: bits_of(floats(a) * floats(b)),
    "fma.rn.f32": lambda a, b, c: bits_of((floats(a).astype(np.float64) * floats(b) + floats(c)).astype(np.float32)),
    "cvt.rn.bf16x2.f32": lambda high, low: narrow(floats(low)).astype(np.int64) | narrow(floats(high)).astype(np.int64) << 16,
    "mov.b32": lambda a: a,
    "mov.f32": lambda a: a,
    "setp.ne.b32": lambda a, b: a != b,
    "setp.eq.u32": lambda a, b: a == b,
    "setp.lt.u32": lambda a, b: a < b,
    "setp.gt.s32": lambda a, b: a.astype(np.uint32).view(np.int32) > b,
}


class Machine(Language):
    """`gl` for one program, with inline PTX."""

    def __init__(self, device: Device, warps: int, *ids: int, programs: int = 1):
        super().__init__(*ids)
        self.programs = programs
        self.device, self.count, self.memory = device, 32 * warps, np.full(SHARED_NBYTES, 0xFF, np.uint8)

    def program(self, kernel: Any, **stand_ins: Any) -> Callable[..., Any]:
        """Return a kernel as this program runs it; `stand_ins` by name for what it cannot run."""
        return rebound(kernel, self, **{"shared": self.shared, **stand_ins})

    def num_programs(self, axis: int) -> Lanes:  # type: ignore[override]
        return np.full(1, self.programs, np.int32).view(Lanes)

    def arange(self, start: int, end: int, layout: Any) -> Lanes:  # type: ignore[override]
        return np.arange(start, end, dtype=np.int32).view(Lanes)

    @staticmethod
    def where(choice: Any, a: Any, b: Any) -> Values:
        return Language.where(choice, a, b).view(Lanes)

    def shared(self, nbytes: int, tid: Lanes) -> tuple[Any, Lanes]:
        self.memory = self.memory[:nbytes]
        return SimpleNamespace(_keep_alive=lambda: None), np.zeros(self.count, np.int32).view(Lanes)

    def store(self, to: Address, value: Any, mask: Any) -> None:  # type: ignore[override]
        at, bits, seen = np.broadcast_arrays(to.at, np.asarray(value), np.asarray(mask))
        self.device.bytes[at[seen][:, None] + np.arange(2)] = np.ascontiguousarray(bits[seen])[:, None].view(np.uint8)

    def load(self, source: Address, mask: Any, other: Any) -> Any:  # type: ignore[override]
        at, seen = np.broadcast_arrays(source.at, np.asarray(mask))
        raw = self.device.bytes[np.where(seen, at, 0)[:, None] + np.arange(4)]
        return np.where(seen, np.ascontiguousarray(raw).view(np.float32)[:, 0], np.float32(other)).view(Lanes)

    @staticmethod
    def sqrt(value: Any) -> Any:
        return np.sqrt(value).view(Lanes)

    def inline_asm_elementwise(self, text: str, registers: str, args: Any, dtype: Any, is_pure: bool, pack: int) -> Any:
        outs = registers.count("=")
        held = {f"${outs + i}": self._bits(value) for i, value in enumerate(args)}
        body = re.sub(r"//.*", "", text).strip()
        for statement in (body[1:-1] if body.startswith("{.") else body).split(";"):
            if statement.strip() and not statement.strip().startswith(IGNORED):
                self._do(statement.strip(), held)
        kinds = dtype if isinstance(dtype, tuple) else (dtype,)
        found = tuple(self._typed(held[f"${i}"], kind) for i, kind in enumerate(kinds))
        return found if isinstance(dtype, tuple) else found[0]

    @staticmethod
    def _typed(bits: np.ndarray, kind: Any) -> Lanes:
        wide = np.dtype(kind).itemsize == 8
        return (bits if wide else bits.astype(np.uint32)).view(kind).view(Lanes)

    def _bits(self, value: Any) -> np.ndarray:
        value = np.ascontiguousarray(np.broadcast_to(np.asarray(value), self.count))
        if value.dtype == np.float32:
            value = value.view(np.uint32)
        return value.astype(np.int64) if value.dtype == np.int64 else value.astype(np.int64) & MASK

    def _value(self, name: str, held: dict[str, np.ndarray]) -> np.ndarray:
        if name in held:
            return held[name]
        return np.full(self.count, int(name[2:], 16) if name.startswith("0f") else int(name, 0), np.int64)

    def _do(self, statement: str, held: dict[str, np.ndarray]) -> None:
        seen = np.full(self.count, True)
        if statement.startswith("@p "):
            seen, statement = held["p"].astype(bool), statement[3:]
        op, _, rest = statement.partition(" ")
        parts = [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,]+", rest)]
        if op == "mov.b64":
            low, high = parts[0].strip("{}").split(",")
            word = self._value(parts[1], held)
            held[low], held[high] = word & MASK, word >> 32 & MASK
        elif op in INSTRUCTIONS:
            found = INSTRUCTIONS[op](*(self._value(part, held) for part in parts[1:]))
            found = found if found.dtype == bool else found & MASK
            held[parts[0]] = found if seen.all() else np.where(seen, found, held[parts[0]])
        elif op.startswith("mma."):
            multiply = self._multiply_bytes if ".u8.s8." in op else self._multiply
            multiply(*(part.strip("{}").split(",") for part in parts), held=held)
        elif op.startswith("ld."):
            self._load(op, parts[0].strip("{}").split(","), self._place(parts[1], held), held, seen)
        elif op.startswith("st."):
            memory = self.device.bytes if ".global" in op else self.memory
            for i, name in enumerate(parts[1].strip("{}").split(",")):
                value = np.ascontiguousarray(self._value(name, held)[seen].astype(np.uint32)[:, None])
                place = self._place(parts[0], held)[seen] + 4 * i
                memory[place[:, None] + np.arange(4)] = value.view(np.uint8)
        elif op == "shfl.sync.bfly.b32":
            value = self._value(parts[1], held).reshape(-1, 32)
            held[parts[0]] = value[:, np.arange(32) ^ int(parts[2])].reshape(-1)
        elif op == "shfl.sync.idx.b32":
            value, lanes = (self._value(part, held).reshape(-1, 32) for part in parts[1:3])
            held[parts[0]] = np.take_along_axis(value, lanes, 1).reshape(-1)
        else:
            assert op.startswith("cp.async."), statement
            to, size = self._place(parts[0], held), int(parts[2])
            full = seen & (self._value(parts[3], held) == size) if len(parts) > 3 else seen
            self.memory[to[seen & ~full][:, None] + np.arange(size)] = 0
            self._copy(to[full], self._place(parts[1], held)[full], size)

    def _place(self, text: str, held: dict[str, np.ndarray]) -> np.ndarray:
        name, _, more = text.strip("[]").partition("+")
        return held[name] + int(more or 0)

    def _copy(self, to: np.ndarray, source: np.ndarray, size: int) -> None:
        assert not (to % size).any()
        assert not (source % size).any()
        self.device.check(source, size)
        self.memory[to[:, None] + np.arange(size)] = self.device.bytes[source[:, None] + np.arange(size)]

    def _load(self, op: str, outs: list[str], at: np.ndarray, held: dict[str, np.ndarray], seen: np.ndarray) -> None:
        size = {"b16": 2, "b64": 8}.get(op.rpartition(".")[2], 4)
        assert not (at[seen] % (size * len(outs))).any()
        memory = self.memory
        if ".global" in op:
            self.device.check(at[seen], size * len(outs))
            memory = self.device.bytes
        for i, out in enumerate(outs):
            raw = np.ascontiguousarray(memory[np.where(seen, at + size * i, 0)[:, None] + np.arange(size)])
            found = raw.view(f"u{size}")[:, 0].astype(np.int64)
            held[out] = found if seen.all() else np.where(seen, found, held[out])

    def _multiply(self, d: list[str], a: list[str], b: list[str], c: list[str], held: dict[str, np.ndarray]) -> None:
        """Execute an mma: lane (g, t) has rows g and g + 8 of a, column g of b, columns 2t and 2t + 1 of c."""

        def half(name: str, k: int) -> np.ndarray:
            return widen((self._value(name, held) >> 16 * k & 0xFFFF).astype(np.uint16)).reshape(-1, 8, 4)

        warps = self.count // 32
        left, right, start = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8)), np.zeros((warps, 16, 8))
        for i, name in enumerate(a):
            for k in (0, 1):
                left[:, i % 2 * 8 :, i // 2 * 8 + k :: 2][:, :8, :4] = half(name, k)
        for i, name in enumerate(b):
            for k in (0, 1):
                right[:, i * 8 + k :: 2][:, :4] = half(name, k).swapaxes(1, 2)
        for i, name in enumerate(c):
            value = self._value(name, held).astype(np.uint32).view(np.float32)
            start[:, i // 2 * 8 :, i % 2 :: 2][:, :8] = value.reshape(-1, 8, 4)
        out = (start + left @ right).astype(np.float32)
        for i, name in enumerate(d):
            found = np.ascontiguousarray(out[:, i // 2 * 8 :, i % 2 :: 2][:, :8])
            held[name] = found.reshape(-1).view(np.uint32).astype(np.int64)

    def _multiply_bytes(self, d: list[str], a: list[str], b: list[str], c: list[str], held: dict[str, np.ndarray]) -> None:
        """Execute an integer mma: as `_multiply`, with four neighbours of a row of a and of a column of b per lane."""

        def byte(name: str, k: int) -> np.ndarray:
            return (self._value(name, held) >> 8 * k & 255).reshape(-1, 8, 4)

        warps = self.count // 32
        left, right, start = (np.zeros((warps, *shape), np.int64) for shape in ((16, 32), (32, 8), (16, 8)))
        for k in range(4):
            for i, name in enumerate(a):
                left[:, i % 2 * 8 :, i // 2 * 16 + k :: 4][:, :8, :4] = byte(name, k)
            for i, name in enumerate(b):
                right[:, i * 16 + k :: 4][:, :4] = byte(name, k).astype(np.int8).swapaxes(1, 2)
        for i, name in enumerate(c):
            value = self._value(name, held).astype(np.uint32).view(np.int32)
            start[:, i // 2 * 8 :, i % 2 :: 2][:, :8] = value.reshape(-1, 8, 4)
        out = start + left @ right
        assert (abs(out) < 1 << 31).all()
        for i, name in enumerate(d):
            held[name] = np.ascontiguousarray(out[:, i // 2 * 8 :, i % 2 :: 2][:, :8]).reshape(-1) & MASK
