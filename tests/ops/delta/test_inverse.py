"""PTX for the inverse of a chunk's matrix and the sums of its decays, on numpy: four warps of 16 rows each."""

import numpy as np
import pytest

from tests.emulator.ptx import MASK, Device, Machine, bits_of, floats

inverse = pytest.importorskip("auraflux.ops.delta.cuda.inverse")
LANES = np.arange(128)


def halves(bits: np.ndarray) -> list[np.ndarray]:
    return [(bits >> shift & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32) for shift in (0, 16)]


def packed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return (
        low.astype(np.float16).view(np.uint16).astype(np.int64) | high.astype(np.float16).view(np.uint16).astype(np.int64) << 16
    )


def block(bits: np.ndarray) -> np.ndarray:
    """Return the four warps' blocks of 8: two neighbours in row lane / 4."""
    return np.stack(halves(bits), 1).reshape(4, 8, 8)


class Warps(Machine):
    def _do(self, statement: str, held: dict[str, np.ndarray]) -> None:
        op, _, rest = statement.partition(" ")
        parts = [part.strip() for part in rest.split(",")]
        if op.startswith("movmatrix"):
            low, high = np.moveaxis(block(held[parts[1]]).swapaxes(1, 2).reshape(128, 2), 1, 0)
            held[parts[0]] = packed(low, high)
        elif op.startswith("mma"):
            d, a, b, c = (part.strip("{}").split(",") for part in rest.replace("},{", "} {").split(" "))
            left = np.concatenate([np.concatenate([block(held[n]) for n in a[k : k + 2]], 1) for k in range(0, len(a), 2)], 2)
            product = left @ np.concatenate([block(held[name]).swapaxes(1, 2) for name in b], 1)
            for k, names in enumerate((d[:2], d[2:])):
                for n, (name, value) in enumerate(
                    zip(names, np.moveaxis(product[:, 8 * k : 8 * k + 8].reshape(128, 2), 1, 0), strict=True)
                ):
                    held[name] = bits_of((value + floats(held[c[2 * k + n]])).astype(np.float32))
        elif op == "cvt.rn.f16x2.f32":
            held[parts[0]] = packed(floats(held[parts[2]]), floats(held[parts[1]]))
        elif op == "cvt.f32.f16":
            held[parts[0]] = bits_of(held[parts[1]])
        elif statement.startswith("mov.b32 {"):
            held["lo"], held["hi"] = halves(held[parts[-1]])
        elif op == "mov.u32":
            held[parts[0]] = LANES.astype(np.int64)
        elif op == "setp.ge.u32":
            held[parts[0]] = held[parts[1]] >= int(parts[2])
        elif op == "selp.f32":
            held[parts[0]] = np.where(held[parts[3]], held[parts[1]], 0)
        elif op == "shfl.sync.up.b32":
            to, reached = parts[0].split("|")
            held[to], held[reached] = np.roll(held[parts[1]], int(parts[2])), int(parts[2]) <= LANES % 32
        elif op == "shfl.sync.idx.b32":
            held[parts[0]] = np.repeat(held[parts[1]][31::32], 32)
        else:
            super()._do(statement, held)

    def run(self, text: str, registers: str, *args: np.ndarray) -> list[np.ndarray]:
        return list(self.inline_asm_elementwise(text, registers, args, (np.uint32,) * registers.count("="), True, 1))


def places() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return rows and columns of the first of each pair that a lane holds of [64, 64]."""
    row, column = LANES // 32 * 16 + LANES % 32 // 4, LANES % 4 * 2
    return [(row + below, column + 8 * tile) for tile in range(8) for below in (0, 8)]


def pairs(x: np.ndarray) -> list[np.ndarray]:
    return [packed(x[at], x[at[0], at[1] + 1]) & MASK for at in places()]


def matrix(found: list[np.ndarray]) -> np.ndarray:
    x = np.empty((64, 64), np.float32)
    for (row, column), bits in zip(places(), found, strict=True):
        x[row, column], x[row, column + 1] = halves(bits.astype(np.int64))
    return x


@pytest.mark.parametrize("similarity", [0.0, 2.0])
def test_inverse_of_a_chunk(similarity):
    random, warps = np.random.default_rng(0), Warps(Device(), 4, 0)
    keys = random.normal(size=(64, 128)) + similarity * random.normal(size=(1, 128))
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    # the diagonal is ignored
    a = -np.tril(keys @ keys.T * random.random((64, 1))).astype(np.float16).astype(np.float32)
    x = matrix(warps.run(inverse.DIAGONAL.value, inverse.PAIRS.value, *pairs(a)))
    for text in (inverse.JOIN16, inverse.JOIN32):
        y = (x.astype(np.float16).astype(np.float32) @ a).astype(np.float32)
        y = [y[row, column + n] for row, column in places() for n in (0, 1)]
        x = x + matrix(warps.run(text.value, inverse.ROUNDED.value, *y)) @ x
    np.testing.assert_allclose(x, np.linalg.inv(np.eye(64) - np.tril(a, -1)), atol=1e-3)


def test_running_sums():
    x, warps = -np.random.default_rng(0).random((32, 2)).astype(np.float32), Warps(Device(), 4, 0)
    found = warps.run(inverse.SUMS.value, "=f,=f,=f,=f,f,f", *np.tile(x, (4, 1)).T)
    first, second, total, _ = (bits.view(np.float32) for bits in found)
    np.testing.assert_allclose(np.stack((first, second), 1).reshape(4, 64), np.tile(x.reshape(-1).cumsum(), (4, 1)), rtol=1e-5)
    np.testing.assert_allclose(total, x.sum(), rtol=1e-5)
