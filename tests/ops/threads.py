"""Gluon kernels whose tensors have one element per thread, on numpy: a program of the grid at a time, its threads side by side.

Triton's interpreter does not run Gluon. This runs a kernel's source with stand-ins for the language and for the pieces of PTX
in `linear._nibbles`, `moe._cuda_quads` and `moe._cuda_choose`, so that places, masks and sums can be checked without a GPU. It
cannot see what goes wrong between threads: copies are done when asked for, and barriers mean nothing.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

OPS = Path(__file__).parents[2] / "auraflux" / "ops"
DTYPES = {torch.bfloat16: np.uint16, torch.int32: np.int32, torch.float32: np.float32}
BF16 = "bfloat16"
SHARED_NBYTES = 1 << 18


def widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Values(np.ndarray):
    """What the threads have; a single one stands for a scalar."""

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        if isinstance(dtype, str):
            return narrow(self).view(Narrow)
        return self.view(dtype) if bitcast else self.astype(dtype)

    def __index__(self) -> int:
        return int(self.flat[0])


class Narrow(Values):
    """bfloat16, by its bits."""

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        return self if isinstance(dtype, str) else widen(np.asarray(self)).astype(dtype).view(Values)


class Pointer:
    """Places in the bytes of a tensor; one outside of them fails when it is used."""

    def __init__(self, memory: np.ndarray, dtype: Any, offset: Any = 0):
        self.memory, self.kind, self.offset = memory, np.dtype(dtype), np.atleast_1d(np.asarray(offset, np.int64))
        self.dtype = SimpleNamespace(element_ty=BF16 if self.kind == np.uint16 else self.kind)

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, self.kind, self.offset + np.asarray(other, np.int64) * self.kind.itemsize)

    def to(self, dtype: Any, bitcast: bool = False) -> "Pointer":
        """As a pointer to bytes, which also stands for an address."""
        return Pointer(self.memory, np.int8, self.offset)

    def read(self, nbytes: int, mask: Any = None) -> tuple[np.ndarray, np.ndarray]:
        offset, seen = np.broadcast_arrays(self.offset, True if mask is None else np.asarray(mask))
        offset = np.where(seen, offset, 0)
        assert (offset >= 0).all()
        assert (offset + nbytes <= self.memory.size).all()
        return np.ascontiguousarray(self.memory[offset[..., None] + np.arange(nbytes)]), seen


def pointer(x: torch.Tensor | None) -> Pointer | None:
    return None if x is None else Pointer(x.view(-1).view(torch.uint8).numpy(), DTYPES[x.dtype])


class Language:
    """`gl` for one program."""

    int8, int32, int64, float32, bfloat16 = np.int8, np.int32, np.int64, np.float32, BF16
    constexpr = pointer_type = staticmethod(lambda x: x)
    static_range = staticmethod(range)
    BlockedLayout = staticmethod(lambda *args: None)
    thread_barrier = staticmethod(lambda: None)
    arange = staticmethod(lambda start, end, layout: np.arange(start, end, dtype=np.int32).view(Values))
    minimum = staticmethod(lambda a, b: np.minimum(a, b).view(Values))
    maximum = staticmethod(lambda a, b: np.maximum(a, b).view(Values))
    exp = staticmethod(lambda x: np.exp(x).view(Values))
    fma = staticmethod(lambda a, b, c: (a * b + c).view(Values))

    def __init__(self, *ids: int):
        self.ids = ids

    def program_id(self, axis: int) -> Values:
        return np.full(1, self.ids[axis], np.int32).view(Values)

    @staticmethod
    def where(choice: Any, a: Any, b: Any) -> Any:
        if isinstance(a, Pointer):
            # of two tensors, as if one lay behind the other
            return Pointer(np.concatenate([a.memory, b.memory]), a.kind, np.where(choice, a.offset, b.offset + a.memory.size))
        kind = next((x.dtype for x in (a, b) if isinstance(x, np.ndarray)), np.int64)
        return np.where(choice, np.asarray(a, kind), np.asarray(b, kind)).view(Values)

    @staticmethod
    def load(place: Pointer, mask: Any = None, other: Any = 0) -> Values:
        raw, seen = place.read(place.kind.itemsize, mask)
        found = raw.view(place.kind)[..., 0]
        if place.kind == np.uint16:
            return narrow(np.where(seen, widen(found), np.float32(other))).view(Narrow)
        return np.where(seen, found, np.asarray(other, place.kind)).view(Values)

    @staticmethod
    def store(place: Pointer, value: Any, mask: Any = True) -> None:
        size = place.kind.itemsize
        offset, value, seen = np.broadcast_arrays(place.offset, np.asarray(value), np.asarray(mask))
        for at, one in zip(offset[seen], value[seen].astype(place.kind), strict=True):
            assert 0 <= at <= place.memory.size - size
            place.memory[at : at + size] = np.frombuffer(one.tobytes(), np.uint8)


class Threads:
    """The pieces of PTX, over the shared memory of one program; it begins as NaN."""

    def __init__(self, warps: int):
        self.count, self.memory = 32 * warps, np.full(SHARED_NBYTES, 0xFF, np.uint8)

    def shared(self, nbytes: int, tid: Values) -> tuple[Any, Values]:
        self.nbytes = nbytes
        return SimpleNamespace(_keep_alive=lambda: None), np.zeros(self.count, np.int32).view(Values)

    def _read(self, at: Any, nbytes: int) -> np.ndarray:
        at = np.asarray(at)
        assert (at >= 0).all()
        assert (at + nbytes <= self.nbytes).all()
        return np.ascontiguousarray(self.memory[at[..., None] + np.arange(nbytes)])

    def word_at(self, at: Any) -> Values:
        return self._read(at, 4).view(np.int32)[..., 0].view(Values)

    def put(self, at: Any, value: Any) -> None:
        for place, one in zip(*np.broadcast_arrays(at, value), strict=True):
            assert 0 <= place <= self.nbytes - 4
            self.memory[place : place + 4] = np.frombuffer(np.float32(one).tobytes(), np.uint8)

    def copy(self, size: int, to: Any, source: Pointer, there: Any) -> None:
        for at, offset, seen in zip(*np.broadcast_arrays(to, source.offset, np.asarray(there)), strict=True):
            if seen:
                assert at % size == 0 <= offset <= source.memory.size - size
                assert at <= self.nbytes - size
                self.memory[at : at + size] = source.memory[offset : offset + size]

    def copy_codes(self, slot: Any, lane: Any, source: Pointer, there: Any, K: int, ROWS: int) -> None:
        row, chunk = lane // 8, lane % 8
        for first in range(0, ROWS, 4):
            at = slot + (first + row) * 128 + (chunk ^ (first + row) % 8) * 16
            self.copy(16, at, source + ((first + row) * (K // 2) + chunk * 16), there)

    def codes_at(self, at: Any) -> tuple[np.ndarray, np.ndarray]:
        return self._read(at, 8).view(np.uint64)[..., 0], self._read(at + 1024, 8).view(np.uint64)[..., 0]

    def load_x(self, kind: Any, registers: Any, first: Pointer, second: Pointer) -> np.ndarray:
        """16 elements a thread, [threads, 16]."""
        raw = np.concatenate([first.read(16)[0], second.read(16)[0]], -1)
        return widen(raw.view(np.uint16))

    def _columns(self, sums: np.ndarray, place: int) -> Values:
        """Of [warps, 8, 8], to the lanes that have column 2t + place."""
        return sums[:, :, place::2].reshape(-1).astype(np.float32).view(Values)

    def sum_x(self, x: np.ndarray) -> tuple[Values, ...]:
        sums = x.reshape(-1, 8, 64).sum(2)
        return tuple(self._columns(np.repeat(sums[:, None], 8, 1), place) for place in (0, 1))

    def group_sums(self, words: tuple[np.ndarray, ...], x: np.ndarray, X: Any, tiles: int) -> tuple[Values, ...]:
        shifts = np.arange(0, 64, 4, dtype=np.uint64)
        found = []
        for word in words:
            codes = ((word[:, None] >> shifts) & np.uint64(15)).astype(np.float32).reshape(-1, 8, 64)
            sums = np.einsum("wgk,wck->wgc", codes, x.reshape(-1, 8, 64))
            found += [self._columns(sums, 0), self._columns(sums, 1)]
        return tuple(found)

    def copy_quad(self, slot: Any, lane: Any, source: Pointer, there: Any, K: int) -> None:
        for first in range(0, 16, 4):
            row = first + lane // 8
            self.copy(16, slot + row * 128 + (lane % 8 ^ row % 8) * 16, source + first * (K // 2), there)

    def sum_quad(self, slot: Any, x: np.ndarray, g: Any, mine: Any, h: int, sums: tuple[Values, ...]) -> tuple[Values, ...]:
        t, X, sums = np.arange(self.count) % 4, self.sum_x(x), sums[:4]
        for j in range(4):
            found = self.group_sums(self.codes_at(slot + (mine ^ 32 * j)), x, None, 1)
            places = [(2 * t + i % 2 == 4 * h + j) * (found[i] + 128 * X[i % 2]) for i in range(4)]
            sums = tuple((one + more).astype(np.float32).view(Values) for one, more in zip(sums, places, strict=True))
        return sums

    def put_rows(self, at: Any, lane: Any, first: Any, second: Any) -> None:
        for more, value in ((0, first), (32, second)):
            sums = np.repeat(np.asarray(value).reshape(-1, 4).sum(1, dtype=np.float32), 4)
            self.put((at + lane // 4 * 4 + more)[lane % 4 == 0], sums[lane % 4 == 0])

    def float_at(self, at: Any, there: Any) -> Values:
        return np.where(there, self._read(np.where(there, at, 0), 4).view(np.float32)[..., 0], np.float32(0)).view(Values)

    def bf16_at(self, word: Any, place: int) -> Values:
        return widen((np.asarray(word).astype(np.int64) >> (16 * place) & 0xFFFF).astype(np.uint16)).view(Values)

    def from_lane(self, value: Any, lane: Any) -> Values:
        value, lane = (np.broadcast_to(x, self.count).reshape(-1, 32) for x in (value, lane))
        return np.take_along_axis(value, lane, 1).reshape(-1).view(Values)

    def over_warp(self, function: Any) -> Any:
        return lambda x: np.repeat(function(x.reshape(-1, 32), 1), 32).astype(x.dtype).view(Values)


def run_source(name: str, names: dict[str, Any]) -> dict[str, Any]:
    """What the source of a module defines, its imports replaced by `names`."""
    text = (OPS / name).read_text()
    text = re.sub(r"^from [^\n]* import (\([^)]*\)|[^\n]*)\n", "", text, flags=re.M)
    same = {"jit": lambda function: function, "constexpr_function": lambda function: function}
    made = {"gluon": SimpleNamespace(**same), **names}
    exec(compile(text, name, "exec"), made)
    return made


def slot_kernels(warps: int, *ids: int) -> dict[str, Any]:
    """The kernels of `moe._cuda_slots` for one program; every warp chooses for itself."""
    threads, language = Threads(warps), Language(*ids)
    found: dict[str, Any] = {"gl": language, "run": lambda *args: None, "wait_ptx": lambda pending: None, "MMA": ""}
    found |= dict.fromkeys(("AWAIT", "COMMIT", "SYNC", "X_GLOBAL"), None) | {"COPY8": 8}
    pieces = ("shared", "word_at", "put", "copy", "copy_codes", "codes_at", "load_x", "bf16_at")
    found |= {name: getattr(threads, name) for name in pieces}
    choosing = run_source("moe/_cuda_choose.py", found)
    choosing |= {"_highest": threads.over_warp(np.max), "_lowest": threads.over_warp(np.min), "from_lane": threads.from_lane}
    choosing |= {"_add_lanes": threads.over_warp(np.sum)}
    for name in ("load_scores", "weights_of", "_choose_wide"):
        choosing[name].__globals__.update(choosing)
    found |= {name: choosing[name] for name in ("load_scores", "weights_of", "from_lane")}
    wide = choosing["_choose_wide"]
    found["choose"] = lambda xs, bias, tid, box, experts, last, E, sigmoid, narrow: wide(
        xs, bias, tid % 32, experts, last, E, sigmoid
    )
    quads = run_source("moe/_cuda_quads.py", found)
    quads |= {name: getattr(threads, name) for name in ("copy_quad", "sum_x", "sum_quad", "put_rows", "float_at")}
    quads |= {"made": lambda value: value, "added": lambda sums: sums}
    for name in ("sum_runs", "scaled", "expert_of", "down_of", "code_bytes"):
        quads[name].__globals__.update(quads)
    return run_source("moe/_cuda_slots.py", {**found, **quads})
