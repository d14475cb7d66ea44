"""The Hopper kernel that quantizes many tokens, on numpy: its Python and its PTX (see `ptx.py`)."""

import re
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from auraflux.ops.gpu.blocks.pages import index_of
from auraflux.ops.turboquant.arrangement import Arrangement
from auraflux.ops.turboquant.cases.inputs import append
from auraflux.ops.turboquant.codebook import codebook
from auraflux.ops.turboquant.cuda.arguments import CodeTensors
from auraflux.ops.turboquant.cuda.encode.prefill import _scaled_table, append_many, config_for, tile_count
from auraflux.ops.turboquant.cuda.encode.tables import SEARCH, SQUARES, bucket_table_for, scaled_midpoints, sign_words, step
from auraflux.ops.turboquant.reference import append_codes
from auraflux.ops.turboquant.rotation import rotation
from tests.emulator.ptx import INSTRUCTIONS, MASK, PAGE, Device, Lanes, Machine, bits_of, floats

CPU = torch.device("cpu")
LONGEST = 128**0.5  # largest coordinate of the kernel's vectors, times sqrt(D)
KINDS = {torch.int32: np.int32, torch.float32: np.float32, torch.bfloat16: np.uint16}


def saturated_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c clamped to [0, 1]; 0 for NaN."""
    found = (floats(a).astype(np.float64) * floats(b) + floats(c)).astype(np.float32)
    return bits_of(np.where(np.isnan(found), np.float32(0), np.clip(found, 0, 1)).astype(np.float32))


def octets(a: np.ndarray, b: np.ndarray, how: np.ndarray) -> np.ndarray:
    both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
    places = [how >> 4 * k & 15 for k in range(4)]
    assert max(place.max() for place in places) < 8
    return sum(((both >> (8 * place).astype(np.uint64)).astype(np.int64) & 255) << 8 * k for k, place in enumerate(places))


MORE = {
    "xor.b32": lambda a, b: a ^ b,
    "not.b32": lambda a: ~a & MASK,
    "mad.lo.u32": lambda a, b, c: a * (b & MASK) + c,
    "fma.rn.sat.f32": saturated_fma,
    "add.rn.f32": INSTRUCTIONS["add.f32"],
    "sub.rn.f32": lambda a, b: bits_of(floats(a) - floats(b)),
    "neg.f32": lambda a: a ^ 0x80000000,
    "max.f32": lambda a, b: bits_of(np.fmax(floats(a), floats(b))),
    "min.f32": lambda a, b: bits_of(np.fmin(floats(a), floats(b))),
    "min.u16x2": lambda a, b: np.minimum(a & 0xFFFF, b & 0xFFFF) | np.minimum(a >> 16, b >> 16) << 16,
    "rsqrt.approx.ftz.f32": lambda a: bits_of((1 / np.sqrt(floats(a).astype(np.float64))).astype(np.float32)),
    "add.s32": lambda a, b: a + b,
    "setp.lt.u32": lambda a, b: a < b,
    "bfind.u32": lambda a: np.floor(np.log2(a)).astype(np.int64),
    # the precision of the hardware
    "rsqrt.approx.ftz.f64": lambda a: ((1 + 2.0**-20) / np.sqrt(a.view(np.float64))).view(np.int64),
}


class Threads(Lanes):
    """Values per thread that convert dtypes like Gluon tensors."""

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        return np.ascontiguousarray(self).view(dtype).view(Threads) if bitcast else self.astype(dtype).view(Threads)


class Places:
    """Addresses of elements of a dtype in device memory."""

    def __init__(self, at: Any, kind: Any):
        self.at, self.kind = np.asarray(at, np.int64), np.dtype(kind)

    def __add__(self, other: Any) -> "Places":
        return Places(self.at + np.asarray(other, np.int64) * self.kind.itemsize, self.kind)

    def to(self, kind: Any, bitcast: bool = False) -> Any:
        return Places(self.at, kind[0]) if isinstance(kind, tuple) else self.at.view(Threads)


class Constant(int):
    """Compile-time constant."""

    value = property(int)


class Coder(Machine):
    """`gl` for one program of this kernel."""

    float64, int16, int64 = np.float64, np.int16, np.int64
    pointer_type = staticmethod(lambda kind: (kind,))
    max = staticmethod(lambda x, axis: int(np.asarray(x).max()))
    # bitwise or is the only reduction used
    reduce = staticmethod(lambda x, axis, combine: int(np.bitwise_or.reduce(np.asarray(x))))

    @staticmethod
    def constexpr(x: Any) -> Any:
        return Constant(x) if isinstance(x, int) else SimpleNamespace(value=x) if isinstance(x, dict) else x

    def arange(self, start: int, end: int, layout: Any) -> Any:
        return np.arange(start, end, dtype=np.int32).view(Threads)

    @staticmethod
    def where(choice: Any, a: Any, b: Any) -> Any:
        kinds = [x.dtype for x in (a, b) if isinstance(x, np.ndarray)]
        kind = kinds[0] if kinds else np.float32 if isinstance(a, float) else np.int32
        return np.where(choice, a, b).astype(kind).view(Threads)

    def load(self, source: Any, mask: Any = True, other: Any = 0, volatile: bool = False) -> Any:
        at, seen = np.broadcast_arrays(source.at, np.asarray(mask))
        raw = self.device.bytes[np.where(seen, at, PAGE)[..., None] + np.arange(source.kind.itemsize)]
        return np.where(seen, np.ascontiguousarray(raw).view(source.kind)[..., 0], source.kind.type(other)).view(Threads)

    def store(self, to: Any, value: Any, mask: Any) -> None:
        raw = np.ascontiguousarray(np.asarray(value).astype(to.kind))[:, None].view(np.uint8)
        seen = np.asarray(mask)
        self.device.bytes[to.at[seen][:, None] + np.arange(to.kind.itemsize)] = raw[seen]

    def _bits(self, value: Any) -> np.ndarray:
        wide = np.ascontiguousarray(np.broadcast_to(np.asarray(value), self.count))
        return wide.view(np.int64) if wide.dtype == np.float64 else super()._bits(value)

    @staticmethod
    def _typed(bits: np.ndarray, kind: Any) -> Any:
        return (bits if np.dtype(kind).itemsize == 8 else bits.astype(np.uint32)).view(kind).view(Threads)

    def _do(self, statement: str, held: dict[str, np.ndarray]) -> None:
        op, _, rest = statement.removeprefix("@p ").partition(" ")
        parts = [part.strip() for part in re.findall(r"\{[^}]*\}|[^,{}]+", rest) if part.strip()]
        values = [self._value(part, held) for part in parts[1:]] if op in OWN else []
        if op.startswith("mma.sync.aligned.m16n8k32"):
            self._add_octets(*(part.strip("{}").split(",") for part in parts), held=held)
        elif op.startswith("mma.sync.aligned.m8n8k4"):
            self._add_wide(*(part.strip("{}").split(",") for part in parts), held=held)
        elif op == "prmt.b32":
            held[parts[0]] = octets(*values)
        elif op == "shfl.sync.idx.b32":
            table, lane = values[0].reshape(-1, 32), values[1].reshape(-1, 32) & 31
            held[parts[0]] = np.take_along_axis(table, lane, 1).reshape(-1)
        elif op == "redux.sync.or.b32":
            held[parts[0]] = np.repeat(np.bitwise_or.reduce(values[0].reshape(-1, 32), 1), 32)
        elif op == "redux.sync.add.s32":
            held[parts[0]] = np.repeat(values[0].reshape(-1, 32).sum(1) & MASK, 32)
        elif op in MORE:
            found = MORE[op](*values)
            held[parts[0]] = found if op.endswith("f64") or found.dtype == bool else found & MASK
        elif op != "cp.async.bulk.prefetch.L2.global":
            super()._do(statement.replace(" + ", "+"), held)

    def _add_octets(self, d: list[str], a: list[str], b: list[str], c: list[str], held: dict[str, np.ndarray]) -> None:
        """Sum bytes over the lanes of a row, times ones."""
        for i, name in enumerate(d):
            words = np.stack([self._value(a[k], held) for k in (i // 2, i // 2 + 2)])
            row = sum(words >> 8 * k & 255 for k in range(4)).sum(0).reshape(-1, 4).sum(1)
            held[name] = self._value(c[i], held) + np.repeat(row, 4) & MASK

    def _add_wide(self, d: list[str], a: list[str], b: list[str], c: list[str], held: dict[str, np.ndarray]) -> None:
        """Multiply float64: lane (g, q) has row g and column q of a, row q and column g of b, columns 2q and 2q + 1 of d."""
        left, right = (self._value(name, held).view(np.float64).reshape(-1, 8, 4) for name in (*a, *b))
        found = (left @ right.transpose(0, 2, 1)).reshape(-1, 2)
        for i, name in enumerate(d):
            held[name] = np.ascontiguousarray(found[:, i]).view(np.int64)


OWN = {*MORE, "prmt.b32", "shfl.sync.idx.b32", "redux.sync.or.b32", "redux.sync.add.s32"}


def run(args: dict[str, Any]) -> None:
    """Append as the kernel does, into the pages of `args`."""
    k, v, pages = args["k"], args["v"], args["pages"]
    tokens, heads, width = k.shape
    device = Device()

    def put(x: Any) -> Any:
        return Places(device.put(x.contiguous()).at, KINDS[x.dtype]) if isinstance(x, torch.Tensor) else np.float32(x)

    keys, values = (
        CodeTensors(put(codes), put(norms), type(places)(*(put(x) for x in places)))
        for codes, norms, places in (
            (pages.key_codes, pages.key_norms, _scaled_table(pages.key_bits, width, CPU)),
            (pages.value_codes, pages.value_norms, _scaled_table(pages.value_bits, width, CPU)),
        )
    )
    sequences = len(pages.lengths)
    tiles, batch = tile_count(tokens, sequences), sequences > 1
    index = index_of(pages, args["starts"])
    index = index._replace(**{name: put(getattr(index, name)) for name in ("table", "lengths", "starts")})
    sides = put(k), put(v), keys, values, put(sign_words(width, pages.seed, CPU))
    rest = index, np.full(1, tokens, np.int32).view(Threads), tiles
    for program in range(2 * tiles * heads):
        machine = Coder(device, 1, program)
        kernel = machine.program(append_many, asm=machine.inline_asm_elementwise, _memory=machine.shared)
        with np.errstate(all="ignore"):
            kernel(*sides, *rest, CONFIG=config_for(pages.key_bits, pages.value_bits, heads, pages.pool[1], batch))
    for side, name in ((keys, "key"), (values, "value")):
        for place, kind in ((side.codes, "codes"), (side.norms, "norms")):
            like = getattr(pages, f"{name}_{kind}")
            like.copy_(device.get(place, like))


def explicit_codebook(x: torch.Tensor) -> torch.Tensor:
    """Make some tokens zero, one-channel, constant, very short, very long, and non-finite."""
    x[3], x[5, :, 1:], x[7], x[9], x[14] = 0.0, 0.0, x[7] * 1e-37, x[9] * 1e30, x[14, :, :1]
    x[11, 0, 6], x[12, 1, 2] = torch.inf, torch.nan
    return x


@pytest.mark.parametrize(
    ("bits", "lengths", "counts"),
    [
        ((4, 4), [123], [70]),
        ((8, 4), [96], [70]),
        ((8, 2), [40], [17]),
        ((4, 2), [123], [33]),
        ((8, 8), [64], [48]),
        ((4, 8), [60, 40, 5, 100, 16], [33, 0, 5, 1, 16]),
    ],
)
def test_emulated_kernel_matches_reference(bits: tuple[int, int], lengths: list[int], counts: list[int]):
    """Compare codes bit for bit, with first positions at multiples of 16 or not, half-new pairs, and batches."""
    torch.manual_seed(0)
    made = append(lengths, counts, 2, 128, dtype=torch.bfloat16, bits=bits, page=64, arrangement=Arrangement.PAIRS)
    args = {**made, "k": explicit_codebook(made["k"]), "v": explicit_codebook(made["v"])}
    want, mine = ({**args, "pages": deepcopy(args["pages"])} for _ in range(2))
    append_codes.reference(**want)
    run(mine)
    for kind in ("key", "value"):
        assert torch.equal(getattr(mine["pages"], f"{kind}_codes"), getattr(want["pages"], f"{kind}_codes"))
        norms = (getattr(args["pages"], f"{kind}_norms") for args in (mine, want))
        torch.testing.assert_close(*norms, rtol=4e-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("bits", SEARCH)
def test_places_find_the_nearest_level(bits: int, width: int):
    """Test coordinates before their division by sqrt(D), up to the longest; midpoints and neighbours are ambiguous."""
    search, (words, scale, offset) = SEARCH[bits], bucket_table_for(bits, width, CPU)
    middles, few = scaled_midpoints(bits, width), search.buckets == 32
    z = np.concatenate([1.2 * np.random.default_rng(0).standard_normal(4000), np.linspace(-1, 1, 9999) * LONGEST, middles])
    place = (z.astype(np.float32).astype(np.float64) * scale + offset).astype(np.float32)
    t = place if few else np.clip(place, 0, 1) + np.float32(1)
    number = np.rint(t.astype(np.float64) * 32) if few else np.rint((t.astype(np.float64) - 1) * (search.buckets - 1))
    n = t.view(np.uint32).astype(np.int64)
    found = (n << search.lift) + words.numpy()[number.astype(np.int64) % search.buckets].astype(np.int64) & MASK
    beyond, doubt, code = few & (found >> 28 != 0), (found & 0xFFFF00) == 0, found >> 24
    want = np.searchsorted(middles, z.astype(np.float32))
    assert (code == want)[~doubt & ~beyond].all()
    assert (code - 1 == want)[-len(middles) :].all()
    assert doubt[-len(middles) :].all()
    assert doubt[: -len(middles)].mean() < 1e-2
    assert not beyond[np.abs(z) < 4.4].any()


@pytest.mark.parametrize("bits", [2, 4])
def test_planes_hold_the_squares_of_levels(bits: int):
    words = bucket_table_for(bits, 128, CPU).words.numpy()
    planes = words[32 : 32 + 6].view(np.uint8).reshape(3, 8).astype(np.int64)
    book = codebook(bits, 128).double().numpy()
    want = book[8:] if bits == 4 else np.pad(book, (0, 4))
    found = (planes[0] + (planes[1] << 8) + (planes[2] << 16)) * step(bits)
    assert np.abs(found - want**2).max() <= step(bits)
    assert planes[2].max() < 256
    assert np.array_equal(words[32 + SQUARES : 32 + SQUARES + len(book)].view(np.float32), (book**2).astype(np.float32))


def test_signs_flip_words_of_two():
    words = sign_words(128, 7, CPU)
    x = torch.randn(128).bfloat16()
    flipped = (x.view(torch.int32) ^ words).view(torch.bfloat16)
    assert torch.equal(flipped, x * rotation(128, 7).signs.bfloat16())
