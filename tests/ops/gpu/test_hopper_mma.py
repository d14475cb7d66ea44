"""Products of codes by the functions of `ops/hopper`, on numpy: one group or column against the dequantized weight."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from auraflux.quant.packing import pack
from tests.emulator.hopper import Hopper, functions
from tests.emulator.ptx import Address, Device
from tests.emulator.threads import narrow, widen

TOL = 1e-5


def drawn(*shape: int) -> np.ndarray:
    """Return random numbers that bf16 represents."""
    return widen(narrow(np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)))


def pairs(values: np.ndarray) -> np.ndarray:
    """Return neighbours as two bf16 of a word."""
    return narrow(np.ascontiguousarray(values)).view(np.int32)


def codes_of(rows: int, width: int, bits: int) -> np.ndarray:
    return np.random.default_rng(bits).integers(0, 1 << bits, (rows, width))


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    return pack(torch.from_numpy(codes), bits).numpy()


def placed(device: Device, array: np.ndarray) -> int:
    address = device.put(torch.from_numpy(np.ascontiguousarray(array)).view(torch.uint8))
    assert isinstance(address, Address)
    return int(address.at[0])


def accumulators(c: tuple, count: int = 1) -> np.ndarray:
    """Return what lanes (g, t) hold of 16 rows and 8 columns, by tiles of columns."""
    out = np.empty((16, 8 * count), np.asarray(c[0]).dtype)
    for i, value in enumerate(c):
        out[i % 4 // 2 * 8 :, i // 4 * 8 + i % 2 : i // 4 * 8 + 8 : 2][:8] = np.asarray(value).reshape(8, 4)
    return out


def close(found: np.ndarray, wanted: np.ndarray, tol: float = TOL) -> bool:
    return bool(np.abs(found - wanted).max() <= tol * np.abs(wanted).max())


def test_fragments_are_rows_and_columns():
    machine = Hopper()
    left, right, start = drawn(16, 16), drawn(16, 8), drawn(16, 9)[:, :8]
    g, t = np.arange(32) // 4, np.arange(32) % 4
    a = [machine.lanes(pairs(left).reshape(16, 8)[g + 8 * (i % 2), t + 4 * (i // 2)]) for i in range(4)]
    b = [machine.lanes(pairs(right.T.copy()).reshape(8, 8)[g, t + 4 * i]) for i in range(2)]
    c = [machine.lanes(start[g + 8 * (i // 2), 2 * t + i % 2], np.float32) for i in range(4)]
    found = functions(machine)["mma_bf16"](c, a, *b)
    assert close(accumulators(found), start + left @ right)


@pytest.mark.parametrize("tiles", [1, 2])
def test_a_group_of_four_bit_codes_meets_its_inputs(tiles: int):
    device, width = Device(), 512
    codes, x = codes_of(16, width, 4), drawn(8 * tiles, width)
    weight, inputs = placed(device, packed(codes, 4)), placed(device, narrow(x))
    machine = Hopper(device)
    made, lane = functions(machine, "mma_int4"), machine.tid
    g, t = lane // 4, lane % 4
    # the second 256 inputs
    begin = machine.lanes(weight + 128, np.int64)
    made["copy_halves"](machine.lanes(0), lane, begin, begin + 8 * width // 2, lane >= 0, width, 16)
    mine = g * 128 + ((t // 2) ^ (g % 2)) * 16 + (t % 2) * 8 + (g // 2) * 32
    for group in range(4):
        words = made["codes_at"](mine ^ (32 * group))
        xs, sums = (), ()
        for m in range(tiles):
            at = inputs + ((8 * m + g) * width + 256 + 64 * group + 16 * t) * 2
            loaded = made["load_x"](made["X_GLOBAL"], "=r," * 8 + "l,l", at.astype(np.int64), at.astype(np.int64) + 16)
            xs, sums = xs + loaded, sums + made["sum_x"](loaded)
        here = slice(256 + 64 * group, 320 + 64 * group)
        total = np.stack([np.asarray(sums[i]).reshape(8, 4)[0] for i in range(2 * tiles)], -1)
        wanted = x[:, here].sum(1)
        for m in range(tiles):
            assert close(total[:, 2 * m : 2 * m + 2].reshape(-1), wanted[8 * m : 8 * m + 8], 1e-4)
        found = accumulators(made["group_sums"](words, xs, sums, tiles), tiles)
        assert close(found, codes[:, here] @ x[:, here].T, 1e-4)


def test_pairs_of_weights_are_operands_of_a_step():
    device = Device()
    codes, x, scales = codes_of(16, 64, 4), drawn(8, 64), np.abs(drawn(16, 1))[:, 0]
    biases = widen(narrow(-7.5 * scales))
    inputs = placed(device, narrow(x))
    machine = Hopper(device)
    made, lane = functions(machine, "mma_int4"), machine.tid
    machine.memory[: 16 * 32] = packed(codes, 4).view(np.uint8).reshape(-1)
    machine.memory[512:576] = narrow(np.concatenate([scales, biases])).view(np.uint8)
    g, t = lane // 4, lane % 4
    lines = [made["scaled_line"](512 + 2 * row, 32) for row in (g, g + 8)]
    a = made["weight_pairs"](g * 32 + t * 8, 8 * 32, *lines)
    at = (inputs + (g * 64 + 16 * t) * 2).astype(np.int64)
    b = made["load_x"](made["X_GLOBAL"], "=r," * 8 + "l,l", at, at + 16)
    c = [machine.lanes(0, np.float32)] * 4
    for step in range(4):
        c = made["mma_bf16"](c, a[4 * step : 4 * step + 4], b[step], b[4 + step])
    weights = widen(narrow(codes * scales[:, None] + biases[:, None]))  # each is rounded once
    assert close(made["WEIGHTS_SCALE"] * accumulators(c), weights @ x.T)


def test_half_pairs_of_weights_are_operands_of_two_steps():
    machine = Hopper(Device())
    made, lane = functions(machine, "mma_int4"), machine.tid
    codes, x, scales = codes_of(16, 64, 4), drawn(8, 64), np.abs(drawn(16, 1))[:, 0]
    biases = widen(narrow(-7.5 * scales))
    words = packed(codes, 4).view(np.int32).reshape(16, 8)
    machine.memory[512:576] = narrow(np.concatenate([scales, biases])).view(np.uint8)
    machine.memory[1024:2048] = narrow(x).view(np.uint8).reshape(-1)
    g, t = lane // 4, lane % 4
    lines = [made["scaled_line"](512 + 2 * row, 32) for row in (g, g + 8)]
    c = [machine.lanes(0, np.float32)] * 4
    for half in range(2):
        a = made["half_weight_pairs"](words[g, 2 * t + half], words[g + 8, 2 * t + half], *lines)
        b = made["load_half_x"](1024 + g * 128 + t * 32 + half * 16)
        for step in range(2):
            c = made["mma_bf16"](c, a[4 * step : 4 * step + 4], b[2 * step], b[2 * step + 1])
    weights = widen(narrow(codes * scales[:, None] + biases[:, None]))
    assert close(made["WEIGHTS_SCALE"] * accumulators(c), weights @ x.T)


@pytest.mark.parametrize("summed", [False, True])
def test_inputs_are_added_and_normalised_as_they_are_loaded(summed: bool):
    device = Device()
    x, delta, norm = drawn(32, 16), drawn(32, 17)[:, :16].copy(), drawn(32, 18)[:, :16].copy()
    places = [placed(device, y) for y in (narrow(x), norm, narrow(delta), np.zeros((32, 16), np.uint16))]
    machine = Hopper(device)
    made, lane = functions(machine, "mma_int4"), machine.tid
    at = [machine.lanes(place + np.arange(32) * 16 * size, np.int64) for place, size in zip(places, (2, 4, 2, 2), strict=True)]
    *words, squares = made["load_normed_x"](made["ADDED_X" if summed else "NORMED_X"], *at, lane < 16)
    total = widen(narrow(x + delta)) if summed else x
    assert close(np.asarray(squares), (total**2).sum(1))
    wanted = narrow(total * norm).reshape(32, 2, 2, 4).swapaxes(2, 3)  # pairs (j, j + 4) of each eight
    assert (np.stack(words, -1).astype(np.int32).view(np.uint16).reshape(32, 2, 4, 2) == wanted).all()
    stored = device.bytes[places[3] : places[3] + 32 * 32].view(np.uint16).reshape(32, 16)
    assert (stored == (narrow(total) * (np.arange(32) < 16)[:, None] if summed else 0)).all()


@pytest.mark.parametrize("second", [0, 1])
def test_four_groups_of_sixteen_rows_are_multiplied(second: int):
    """Rows g and g + 8 use the same inputs, or, where `second`, rows g + 8 the inputs of the next column."""
    device, width = Device(), 256
    codes, x = codes_of(16, width, 4), drawn(2, width)
    scales, biases = drawn(16, 4), drawn(16, 5)[:, :4].copy()
    inputs = placed(device, narrow(x))
    machine = Hopper(device)
    made, lane = functions(machine, "mma_int4_groups"), machine.tid
    row, line, base = width // 2, 8, 1024
    machine.memory[base : base + 16 * row] = packed(codes, 4).view(np.uint8).reshape(-1)
    lines = base + 16 * row
    machine.memory[lines : lines + 16 * line] = narrow(scales).view(np.uint8).reshape(-1)
    machine.memory[lines + 16 * line : lines + 32 * line] = narrow(biases).view(np.uint8).reshape(-1)
    # columns 2n and 2n + 1 have group n, of the first token and of the second
    column, t = lane // 4, lane % 4
    at = inputs + ((column % 2) * second * width + column // 2 * 64 + t * 16) * 2
    pair = made["pair_16"](made["load_16"](at.astype(np.int64)))
    words = made["codes_two"](machine.lanes(base), lane, row, 8 * row)
    held = made["scales_two"](machine.lanes(lines), lane, line, 8 * line, 16)
    for sums in (None, made["sums_16"](pair)):
        found = made["row_products"](words, held, pair, sums, lane, second)
        made["put_rows"](machine.lanes(0), lane, *found)
        made["put_rows"](machine.lanes(64), lane, *found)
        weight = codes * np.repeat(scales, 64, 1) + np.repeat(biases, 64, 1)
        wanted = np.concatenate([weight[:8] @ x[0], weight[8:] @ x[second]])
        assert close(machine.memory[:64].view(np.float32), wanted, 1e-3)
        twice = made["sum_at"](lane % 16 * 4, lane < 16, 2)
        assert close(np.asarray(twice)[:16], 2 * wanted, 1e-3)
        assert not np.asarray(twice)[16:].any()


def test_sums_of_groups_are_weighed():
    machine = Hopper()
    scale, bias, codes, inputs = drawn(4, len(machine.tid)).astype(np.float32)
    found = functions(machine, "mma_int4_groups")["scaled_sum"](scale, bias, codes * np.float32(2.0**-73), inputs)
    assert close(np.asarray(found), scale * codes + bias * inputs, 1e-6)


def test_values_can_be_stored_as_inputs_are_paired():
    machine = Hopper()
    made, row = functions(machine, "mma_int4_groups"), machine.tid % 16
    x = drawn(16)
    words = [machine.lanes(word) for word in pairs(x)]
    value, place = made["paired"](machine.lanes(np.tile(x, 2), np.float32), row)
    stored = np.empty(16, np.uint16)
    stored[np.asarray(place)[:16]] = narrow(np.asarray(value))[:16]
    assert [int(np.asarray(word)[0]) for word in made["pair_16"](words)] == stored.view(np.int32).tolist()


FORMATS = [(bits, True) for bits in (2, 3, 4, 5, 6, 8)] + [(4, False)]
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@pytest.mark.parametrize(("bits", "affine"), FORMATS)
def test_columns_of_all_formats_meet_their_inputs(bits: int, affine: bool):
    device, column = Device(), 64 if affine else 32
    codes, x = codes_of(16, column, bits), drawn(8, column)
    inputs = placed(device, narrow(x))
    machine = Hopper(device)
    made, lane = functions(machine, "mma_bits"), machine.tid
    g, t = lane // 4, lane % 4
    nbytes = column * bits // 8
    machine.memory[: 16 * nbytes] = packed(codes, bits).view(np.uint8).reshape(-1)
    word = made["word_count"](bits, column) * t if bits not in (3, 5) else bits * t // 4
    after, shift = g * nbytes, t * 0
    if bits in (3, 5):
        after, shift = g * nbytes + np.minimum(word + 1, bits - 1) * 4, 8 * bits * t % 32
    words = made["words_at"](g * nbytes + word * 4, after, 0, bits, column, nbytes)
    xs = made["load_x"]((inputs + g * column * 2).astype(np.int64), t, bits, column, affine, "global")
    starts = made["column_starts"](xs, bits, column, affine)
    c = accumulators(made["column_sums"](words, xs, shift, bits, column, affine, 1, 1))
    if not affine:
        assert close(c * float(made["MX_SHIFT"]), FP4[codes] @ x.T, 1e-4)
        return
    sums = np.stack([np.asarray(start).reshape(8, 4)[0] for start in starts], -1)
    assert close(sums[:, :2].reshape(-1), x.sum(1), 1e-4)
    # what codes have been added to is taken out by the start
    offsets = made["offsets"](bits, column // 8)
    assert len(made["field_places"](bits, column // 8)) == len(offsets)
    assert close(c + sums[:, 2:].reshape(-1), codes @ x.T, 3e-3)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_columns_are_multiplied_as_integers(bits: int):
    """Eight columns of one token: x is rounded to 16 bits over the largest of its column."""
    device, column = Device(), 64
    codes, x = codes_of(16, 8 * column, bits), drawn(8 * column)
    inputs = placed(device, narrow(x))
    machine = Hopper(device)
    made, lane = functions(machine, "mma_int8"), machine.tid
    g, t = lane // 4, lane % 4
    nbytes, pitch = column * bits // 8, column * bits
    machine.memory[: 16 * pitch] = packed(codes, bits).view(np.uint8).reshape(-1)
    regs = column // 8
    raw = made["raw_x"]((inputs + made["column_of"](lane) * column * 2).astype(np.int64), t, column)
    rounded = made["rounded"](raw, lane, bits, column)
    both, factors = rounded[:regs], rounded[regs:]
    high = np.where(np.asarray(t) < 2, 256, 1)
    sums = made["sums_of_x"](both, bits, column)
    shift, wanted = made["shifts"](t, bits), codes.reshape(16, 8, column) @ np.eye(column)
    assert len(shift) == {3: 2, 5: 4}.get(bits, 0)
    # a lane accumulates columns 4u to 4u + 3, u = t % 2, the high bytes where t < 2 and else the low ones
    parts = x.reshape(8, column)
    for k in range(4):
        scaled = np.asarray(sums[k]).astype(np.float64) * np.asarray(factors[k]) * high
        whole = scaled.reshape(8, 2, 2)[0]  # high or low, u
        assert close(whole.sum(0), parts.sum(1)[[k, 4 + k]], 1e-3)
    for n in range(8):
        at = g * pitch + column * bits // 32 * t // 4 * 4
        words = made["byte_words_at"](at, n * nbytes, bits, column, pitch)
        assert len(words) == 2 * made["words_of_row"](bits, column)
        c = accumulators(made["byte_sums"](words, both + tuple(shift), bits, column, 1, n % 4))
        # lane t has columns 2t and 2t + 1: high bytes of four columns, then low ones
        k = n % 4
        factor = np.asarray(factors[k]).reshape(8, 4)[0, n // 4]
        u = n // 4
        at_high, at_low = 2 * u + n % 2, 4 + 2 * u + n % 2
        found = (c[:, at_high] * 256.0 + c[:, at_low]) * factor
        assert close(found, wanted[:, n] @ parts[n], 1e-3), n


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_code_has_a_byte_of_its_own(bits: int):
    made = functions(Hopper(), "mma_int8")
    found = [made["place_of"](bits, q, b) for q in range(4) for b in range(4)]
    assert sorted(code for code, _ in found) == list(range(16))
    assert all(higher + bits <= 8 for _, higher in found)
    for q in range(4):
        ones = made["in_place"](bits, q, 1)
        assert [ones >> 8 * b & 255 for b in range(4)] == [1 << found[4 * q + b][1] for b in range(4)]
