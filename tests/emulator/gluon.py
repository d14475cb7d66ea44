"""Gluon on numpy, as far as the kernels here use it: every program runs as a unit, tensors are arrays, layouts are ignored.

Triton's interpreter does not run Gluon. This runs a kernel's Python with stand-ins for the language, so that addresses, masks
and loops can be checked without a GPU. It does not see layouts (the compiler checks those), barriers and asynchronous copies.
"""

import re
import types
from itertools import product
from typing import Any

import numpy as np
import torch

from tests.emulator.rebind import rebound

DTYPES = {
    "int32": np.int32,
    "int64": np.int64,
    "uint32": np.uint32,
    "float16": np.float16,
    # numpy has none
    "bfloat16": np.float32,
    "float32": np.float32,
    "float64": np.float64,
    "int8": np.int8,
    "int1": np.bool_,
}


MEMORIES: list[np.ndarray] = []


def plain(x: Any) -> Any:
    return x.data if isinstance(x, Tensor) else x


class Tensor:
    def __init__(self, data: Any):
        self.data = np.asarray(data)

    shape = property(lambda self: self.data.shape)

    def to(self, dtype: Any, bitcast: bool = False) -> "Tensor":
        return Tensor(self.data.view(dtype) if bitcast else self.data.astype(dtype))

    def reshape(self, *shape: int) -> "Tensor":
        return Tensor(self.data.reshape(shape))

    def broadcast_to(self, shape: list[int]) -> "Tensor":
        return Tensor(np.broadcast_to(self.data, shape))

    def permute(self, *order: int) -> "Tensor":
        return Tensor(self.data.transpose(order))

    def __getitem__(self, key: Any) -> "Tensor":
        return Tensor(self.data[key])

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)


def _binary(name: str, swap: bool = False) -> Any:
    def apply(self: Tensor, other: Any) -> Any:
        if isinstance(other, Pointer):
            return other + self
        a, b = self.data, plain(other)
        # Python numbers take the tensor's dtype
        if isinstance(b, (int, float)) and not isinstance(b, bool) and a.dtype != np.bool_:
            b = a.dtype.type(b) if a.dtype.kind != "i" or isinstance(b, int) else np.float32(b)
        a, b = (b, a) if swap else (a, b)
        return Tensor(getattr(np, name)(a, b))

    return apply


for _sign, _name in {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "rshift": "right_shift", "lshift": "left_shift", "floordiv": "floor_divide", "mod": "remainder",
}.items():  # fmt: skip
    setattr(Tensor, f"__{_sign}__", _binary(_name))
    setattr(Tensor, f"__r{_sign}__", _binary(_name, swap=True))
for _sign, _name in {
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "eq": "equal",
    "ne": "not_equal",
}.items():
    setattr(Tensor, f"__{_sign}__", _binary(_name))
Tensor.__neg__ = lambda self: Tensor(-self.data)  # type: ignore[attr-defined]


class Pointer:
    """Elements of a flat array; reading or writing outside of it fails."""

    def __init__(self, memory: np.ndarray, offset: Any = 0):
        self.memory, self.offset = memory, np.asarray(offset, np.int64)

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + plain(other))

    __radd__ = __add__

    def to(self, dtype: Any) -> Tensor:
        """Return addresses: the number of the memory in the upper bits, bytes in the lower."""
        if not any(found is self.memory for found in MEMORIES):
            MEMORIES.append(self.memory)
        number = next(i for i, found in enumerate(MEMORIES) if found is self.memory)
        return Tensor((np.int64(number) << 40) + self.offset * self.memory.itemsize)

    def places(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        offset, seen = np.broadcast_arrays(self.offset, True if mask is None else plain(mask))
        assert ((offset >= 0) & (offset < self.memory.size))[seen].all(), "outside of the memory"
        return np.where(seen, offset, 0), seen


class Shared:
    """A view of a program's shared memory."""

    def __init__(self, memory: np.ndarray, start: int, dtype: Any, shape: list[int]):
        self.memory, self.start, self.dtype, self.shape = memory, start, np.dtype(dtype), list(shape)
        self.cut: tuple[slice, ...] = ()
        self.order: tuple[int, ...] = tuple(range(len(shape)))

    def _array(self) -> np.ndarray:
        nbytes = int(np.prod(self.shape)) * self.dtype.itemsize
        return self.memory[self.start : self.start + nbytes].view(self.dtype).reshape(self.shape)

    def index(self, place: int) -> "Shared":
        step = int(np.prod(self.shape[1:])) * self.dtype.itemsize
        return Shared(self.memory, self.start + place * step, self.dtype, self.shape[1:])

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> "Shared":
        return Shared(self.memory, self.start, dtype, shape)

    def permute(self, order: tuple[int, ...]) -> "Shared":
        """Return a view that loads permuted."""
        made = Shared(self.memory, self.start, self.dtype, self.shape)
        made.cut, made.order = self.cut, order
        return made

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        made = Shared(self.memory, self.start, self.dtype, self.shape)
        cuts = list(self.cut or [slice(None)] * len(self.shape))
        cuts[dim] = slice(start, start + length)
        made.cut = tuple(cuts)
        return made

    def store(self, value: Tensor) -> None:
        self._array()[self.cut or ...] = value.data

    def load(self, layout: Any) -> Tensor:
        return Tensor(self._array()[self.cut or ...].transpose(self.order).copy())

    def _keep_alive(self) -> None:
        pass


class Program:
    """The language as one program of a grid sees it."""

    def __init__(self, ids: tuple[int, ...] = (0, 0, 0), grid: tuple[int, ...] = (1, 1, 1)):
        self.ids, self.grid, self.shared, self.taken = ids, grid, np.zeros(1 << 20, np.uint8), 0
        vars(self).update(DTYPES)

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: Any, value: Tensor | None = None) -> Shared:
        made = Shared(self.shared, self.taken, dtype, shape)
        self.taken += int(np.prod(shape)) * made.dtype.itemsize
        if value is not None:
            made.store(value)
        return made

    def program_id(self, axis: int) -> Tensor:
        return Tensor(np.int32(self.ids[axis]))

    def num_programs(self, axis: int) -> Tensor:
        return Tensor(np.int32(self.grid[axis]))

    def inline_asm_elementwise(self, text: str, constraints: str, args: list, dtype: Any, is_pure: bool, pack: int) -> Any:
        if "cp.async" in text:
            return copy(self, text, args)
        if "atom.acq_rel.gpu.global.add" in text:  # by the first thread
            at, before = Pointer(args[0].memory, args[0].offset.flat[0]), np.full(args[0].offset.shape, -1, np.int32)
            before[0] = self.atomic_add(at, 1).data
            return Tensor(before)
        if isinstance(dtype, tuple) and dtype[0] is np.float16:
            return [Tensor(pair) for pair in look_up(self, text, args, len(dtype))]
        if isinstance(dtype, tuple):
            return [Tensor(word.view(kind)) for word, kind in zip(read(self, text, plain(args[0])), dtype, strict=True)]
        return Tensor(emulate(self, text, args).astype(dtype))

    constexpr = staticmethod(lambda x: x)
    arange = staticmethod(lambda start, end, layout=None: Tensor(np.arange(start, end, dtype=np.int32)))
    full = staticmethod(lambda shape, value, dtype, layout: Tensor(np.full(shape, value, dtype)))
    convert_layout = staticmethod(lambda x, layout, assert_trivial=False: x)
    permute = staticmethod(lambda x, order: Tensor(x.data.transpose(order)))
    reshape = staticmethod(lambda x, shape: Tensor(x.data.reshape(shape)))
    expand_dims = staticmethod(lambda x, axis: Tensor(np.expand_dims(x.data, axis)))
    join = staticmethod(lambda a, b: Tensor(np.stack([a.data, b.data], -1)))
    split = staticmethod(lambda x: (Tensor(x.data[..., 0]), Tensor(x.data[..., 1])))
    where = staticmethod(lambda c, a, b: Tensor(np.where(plain(c), plain(a), _like(plain(b), plain(a)))))
    maximum = staticmethod(lambda a, b: Tensor(np.maximum(plain(a), plain(b))))
    minimum = staticmethod(lambda a, b: Tensor(np.minimum(plain(a), plain(b))))
    max = staticmethod(lambda x, axis: Tensor(x.data.max(axis)))
    sum = staticmethod(lambda x, axis: Tensor(x.data.sum(axis, dtype=x.data.dtype)))
    associative_scan = staticmethod(lambda x, axis, add: Tensor(np.cumsum(x.data, axis, dtype=x.data.dtype)))
    exp2 = staticmethod(lambda x: Tensor(np.exp2(x.data)))
    exp = staticmethod(lambda x: Tensor(np.exp(x.data)))
    log = staticmethod(lambda x: Tensor(np.log(x.data)))
    sqrt = staticmethod(lambda x: Tensor(np.sqrt(x.data)))
    rsqrt = staticmethod(lambda x: Tensor(1 / np.sqrt(x.data)))
    zeros_like = staticmethod(lambda x: Tensor(np.zeros_like(x.data)))
    fma = staticmethod(lambda a, b, c: Tensor(plain(a) * plain(b) + plain(c)))
    cdiv = staticmethod(lambda a, b: Tensor(-(-plain(a) // plain(b))))
    static_range = staticmethod(range)
    static_assert = staticmethod(lambda condition: None)
    thread_barrier = staticmethod(lambda: None)
    num_warps = staticmethod(lambda: 4)

    @staticmethod
    def load(pointer: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "", eviction_policy: str = "") -> Tensor:
        places, seen = pointer.places(mask)
        found = pointer.memory[places]
        return Tensor(np.where(seen, found, np.asarray(plain(other), found.dtype)))

    @staticmethod
    def store(pointer: Pointer, value: Any, mask: Any = None, eviction_policy: str = "") -> None:
        places, seen = pointer.places(mask)
        pointer.memory[places[seen]] = np.broadcast_to(plain(value), places.shape)[seen].astype(pointer.memory.dtype)

    def atomic_add(self, pointer: Pointer, value: int, sem: str = "", scope: str = "") -> Tensor:
        before = self.load(pointer)
        self.store(pointer, before + value)
        return before

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)


def _like(b: Any, a: Any) -> Any:
    return np.asarray(b, a.dtype) if isinstance(b, float) and isinstance(a, np.ndarray) else b


def emulate(gl: Program, text: str, args: list) -> np.ndarray:
    """Execute inline PTX, recognised by its source."""
    x = plain(args[0])
    if "movmatrix" in text:
        return x.reshape(*x.shape[:-2], -1, 8, 8).swapaxes(-1, -2).reshape(x.shape)
    if "shfl.sync.idx" in text:  # of a product of tensor cores, a row for all
        return np.broadcast_to(x[..., int(args[1]) % 16, :][..., None, :], x.shape)
    if "shfl" in text:
        span = int(re.search(r"\$1, (\d+), 31", text).group(1))  # type: ignore[union-attr]
        per = x.shape[-1] // 32
        lanes = x.reshape(*x.shape[:-1], 32, per)
        return lanes[..., np.arange(32) ^ span, :].reshape(x.shape)
    if "ld.shared" in text:
        return look_up(gl, text, args, 1)[0]
    if "global_smem" in text or "%laneid" in text or "%tid" in text:
        return np.zeros_like(np.asarray(x))
    if "bfe" in text:
        first, count = map(int, re.search(r"\$1, (\d+), (\d+);", text).groups())  # type: ignore[union-attr]
        return np.asarray(x) >> first & ((1 << count) - 1)
    if "redux" in text or text == "mov.b32 $0,$1;":  # of one number, which all lanes have
        return np.asarray(x)
    raise NotImplementedError(text)


def look_up(gl: Program, text: str, args: list, outs: int) -> list[np.ndarray]:
    """Execute look-ups by their PTX: every argument is two registers, every result a word of two float16."""
    words, memory = [np.asarray(plain(arg)) for arg in args], gl.shared.view(np.uint32)
    registers = {f"${outs + 2 * i}": w[..., 0] if w.ndim else w for i, w in enumerate(words)}
    registers = {name: w.astype(np.uint32) for name, w in registers.items()}
    registers |= {f"${outs + 2 * i + 1}": registers[f"${outs + 2 * i}"] for i in range(len(words))}

    def value(operand: str) -> np.ndarray:
        return registers[operand] if operand in registers else np.uint32(int(operand, 0))

    for line in text.strip("{}").split(";"):
        name, _, rest = line.strip().partition(" ")
        to, *given = re.split(r", *", rest.strip())
        if name == "ld.shared.v2.b32":
            (low, high), (place, offset) = (to.strip("{"), given[0].strip("}")), given[1].strip("[]").split("+")
            at = (value(place.strip()) + np.uint32(int(offset))) // 4
            registers[low], registers[high] = memory[at], memory[at + 1]
        elif name == "ld.shared.b32":
            place, offset = given[0].strip("[]").split("+")
            registers[to] = memory[(value(place.strip()) + np.uint32(int(offset))) // 4]
        elif name == "prmt.b32":
            eight = value(given[0]).astype(np.uint64) | value(given[1]).astype(np.uint64) << np.uint64(32)
            picked = [int(given[2], 0) >> (4 * i) & 7 for i in range(4)]
            found = [(eight >> np.uint64(8 * b) & np.uint64(255)) << np.uint64(8 * i) for i, b in enumerate(picked)]
            registers[to] = (found[0] | found[1] | found[2] | found[3]).astype(np.uint32)
        elif name in SIMPLE:
            registers[to] = SIMPLE[name](*map(value, given))
        elif name and name != ".reg":
            raise NotImplementedError(line)
    return [np.stack([registers[f"${i}"]], -1).view(np.float16) for i in range(outs)]


SIMPLE = {
    "add.u32": lambda a, b: a + b,
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "shf.r.wrap.b32": lambda low, high, n: low >> n | high << (np.uint32(32) - n),
    "lop3.b32": lambda a, b, c, _: a & b | c,
}


def copy(gl: Program, text: str, args: list) -> None:
    """Execute the asynchronous copies of inline PTX, synchronously."""
    found = re.findall(r"@(\w) cp[\w.]+ \[\$(\d) \+ (\d+)\], \[\$(\d) \+ (\d+)\], (\d+)", text)
    for who, to, to_at, source, source_at, size in found:
        # q: half of the lanes
        lanes = np.arange(32) < (16 if who == "q" else 32)
        places = plain(args[int(to) - 1]), plain(args[int(source) - 1]), plain(args[-1]) != 0, lanes
        targets, sources, needed, mine = np.broadcast_arrays(*places)
        targets, sources = targets[needed & mine], sources[needed & mine]
        steps = np.arange(int(size))
        for number in np.unique(sources >> 40):
            mine, memory = sources >> 40 == number, MEMORIES[number].view(np.uint8)
            first, target = (sources[mine] & ((1 << 40) - 1)) + int(source_at), targets[mine] + int(to_at)
            assert (first % int(size) == 0).all(), "not aligned"
            assert (target % int(size) == 0).all(), "not aligned"
            gl.shared[target[:, None] + steps] = memory[first[:, None] + steps]


def read(gl: Program, text: str, addresses: np.ndarray) -> list[np.ndarray]:
    found = []
    for flip, count, at in re.findall(r"(?:xor\.b32 a, \$\d+, (\d+); )?ld\.shared(?:\.v(\d))?\.b32 .*?\+ (\d+)\];", text):
        words = gl.shared.view(np.int32)
        found += [words[((addresses ^ int(flip or 0)) + int(at)) // 4 + i] for i in range(int(count or 1))]
    return found


def mma_v2(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    return Tensor(a.data.astype(np.float32) @ b.data.astype(np.float32) + acc.data)


def copy_to_shared(to: Shared, source: Pointer, mask: Any = None) -> None:
    places, seen = np.broadcast_arrays(source.offset, True if mask is None else plain(mask))
    to.store(Program.load(Pointer(source.memory, places), Tensor(seen)))


async_copy = types.SimpleNamespace(
    async_copy_global_to_shared=copy_to_shared, commit_group=lambda: None, wait_group=lambda pending: None
)
STILL = {"async_copy": async_copy, "mma_v2": mma_v2, "gdc_wait": lambda: None, "gdc_launch_dependents": lambda: None}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 0,
    maxnreg: int = 0,
    stand_ins: Any = None,
    **constants: Any,
) -> None:
    """Run a kernel's programs one after the other; torch tensors are arguments, and are modified in place."""
    constants.pop("launch_pdl", None)
    MEMORIES.clear()
    # numpy has no bfloat16: such tensors are float32 meanwhile
    widened: list[tuple[torch.Tensor, torch.Tensor]] = []

    def opened(x: Any) -> Any:
        if isinstance(x, tuple):
            return type(x)(*map(opened, x)) if hasattr(x, "_fields") else tuple(map(opened, x))
        if not isinstance(x, torch.Tensor):
            return _number(x)
        if x.dtype == torch.bfloat16:
            widened.append((x, x.float()))
            x = widened[-1][1]
        # of a view, all that follows its first element
        rest = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        return Pointer((x.view(-1) if x.is_contiguous() else x.as_strided((rest,), (1,))).numpy())

    numbers = [opened(x) for x in args]
    width, height, depth = (*grid, 1, 1)[:3]
    for z, y, x in product(range(depth), range(height), range(width)):
        with np.errstate(all="ignore"):
            rebound(kernel, Program((x, y, z), (width, height, depth)), **STILL, **(stand_ins or {}))(*numbers, **constants)
    for given, used in widened:
        given.copy_(used)


def _number(x: Any) -> Any:
    return Tensor(np.int32(x)) if isinstance(x, int) else x
