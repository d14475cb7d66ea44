"""Inner loops of CPU kernels for ARM against numpy: `python -m tests.arm neoverse-n1`."""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from tests.arm.emulator import Machine

RANDOM = np.random.default_rng(7)
ROWS, GROUP, GROUPS = 4, 64, 3


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack rows of codes into rows of 32-bit words, the first code in the lowest bits."""
    ones = (codes[..., None] >> np.arange(bits)) & 1
    return np.packbits(ones.reshape(len(codes), -1).astype(np.uint8), axis=1, bitorder="little").view(np.uint32)


def check_close(found: np.ndarray, expected: np.ndarray, tol: float, what: str) -> None:
    error = float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))
    print(f"{what}: {error:.1e}")
    assert error <= tol, f"{what}: relative RMS {error:.3g} over {tol:g}"


def rounded_to(bits: int, x: np.ndarray) -> np.ndarray:
    """Round groups of activations to 8 bits by their largest, or to 16 by a power of two; 32 bits are as given."""
    largest = np.abs(x).max(-1, keepdims=True)
    if bits == 32:
        return x
    if bits == 8:
        return np.rint(x / largest * 127) * largest / 127
    # 14 bits below the leading one of the largest, whose first byte shall not be rounded up to 128
    exponents = ((largest.view(np.int32) + 0x20000) >> 23) - 127
    step = np.exp2(exponents - 14).astype(np.float32)
    return np.rint(x / step) * step


def check_linear(machine: Machine, bits: int, group: int = GROUP, kind: str = "f32", activation_bits: int = 8) -> None:
    """Check one token from packed codes, and tiles of tokens from unpacked rows."""
    from auraflux.ops.linear.cpu.activations import prepare_token
    from auraflux.ops.linear.cpu.forms import Form
    from auraflux.ops.linear.cpu.microkernels import rows_times_tokens
    from auraflux.ops.linear.cpu.panels import gather_tile, rows_times_tile, tile_nbytes
    from auraflux.ops.linear.cpu.unpack import unpack_rows
    from auraflux.ops.simd.isa import ISA
    from auraflux.quant.levels import levels
    from auraflux.quant.packing import to_lane_layout

    spec, width, tokens, groups = Form(activation_bits, bits, group, kind), GROUP * GROUPS, 8, GROUP * GROUPS // group
    form, what = spec.text, f"linear {bits} bits, groups of {group}, {kind}, {activation_bits}-bit activations"
    codes = RANDOM.integers(0, 2**bits, (ROWS, width))
    scale, bias = RANDOM.uniform(0.5, 1, (2, groups, ROWS)).astype(np.float32)
    x = RANDOM.standard_normal((tokens, width)).astype(np.float32)
    rounded = rounded_to(activation_bits, x.reshape(tokens, groups, group)).reshape(tokens, width)
    bias = bias if kind == "f32" else np.zeros_like(bias)
    meant = codes if kind == "f32" else levels(kind, bits).numpy()[codes]
    expected = rounded @ (meant * scale.T.repeat(group, 1) + bias.T.repeat(group, 1)).T

    code_at = machine.put(to_lane_layout(torch.from_numpy(packed(codes, bits).view(np.int32)), bits).numpy().T)
    scale_at, bias_at, x_at = machine.put(scale), machine.put(bias), machine.put(x)
    stride, tol = width * spec.act_nbytes, 2e-6 if activation_bits == 32 else 1e-5
    acts, scales, sums = machine.room(np.int8, tokens, stride), *(machine.room(np.float32, tokens, groups) for _ in range(2))
    for t in range(tokens):
        offset = 4 * t * groups
        machine.run(prepare_token, (form,), x_at + 4 * t * width, groups, acts + t * stride, scales + offset, sums + offset)
    ready, out = machine.room(np.uint8, ROWS, width), machine.room(np.float32, tokens, ROWS)
    tile, index = machine.room(np.int8, tile_nbytes(spec, width)), machine.put(np.arange(tokens))
    machine.run(
        rows_times_tokens, (form, 1, 0), code_at, scale_at, bias_at, acts, stride, scales, sums, index, groups, out, 4 * ROWS
    )
    check_close(machine.get(out, np.float32, ROWS), expected[0], tol, f"{what}, one token")
    one = machine.get(out, np.float32, ROWS)
    machine.run(unpack_rows, (form,), code_at, 0, groups, ready)
    # with paired products the widest tile needs unpacked rows
    for size, count, from_codes in ((8, 8, False), (8, 5, not ISA.by_pair), (4, 3, True), (2, 2, True)):
        rows, last = (code_at if from_codes else ready), count - 1
        machine.run(gather_tile, (form, size), acts, stride, scales, sums, index, groups, tile, last)
        out = machine.room(np.float32, tokens, ROWS)
        machine.run(
            rows_times_tile, (form, size, int(not from_codes)), rows, scale_at, bias_at, tile, groups, out, 4 * ROWS, last
        )
        many = machine.get(out, np.float32, tokens, ROWS)
        check_close(many[:count], expected[:count], tol, f"{what}, {count} tokens{' from codes' if from_codes else ''}")
        assert np.array_equal(one, many[0]), "a token's result is not batch-invariant"
        assert (many[count:] == 0x7F).all(), "results were stored beyond the last token"


def check_grid(machine: Machine, kind: str, activation_bits: int) -> None:
    """Check products with one of GGUF's grid formats: from its blocks, and from unpacked rows with widened scales."""
    from auraflux.ops.linear.cpu.activations import prepare_token
    from auraflux.ops.linear.cpu.forms import Form
    from auraflux.ops.linear.cpu.microkernels import rows_times_tokens
    from auraflux.ops.linear.cpu.panels import gather_tile, rows_times_tile, tile_nbytes
    from auraflux.ops.linear.cpu.unpack import unpack_rows, widen_scales
    from auraflux.quant import grids

    grid, width, tokens = grids.FORMATS[kind], 2 * grids.SIZE, 2
    spec, groups, group = Form(activation_bits, grid.bits, grid.group, kind, grid.halves), width // grid.group, grid.group
    form, what = spec.text, f"linear {kind}, {activation_bits}-bit activations"
    packed = torch.from_numpy(RANDOM.integers(-(1 << 31), 1 << 31, (ROWS, width * grid.bits // 32)).astype(np.int32))
    halves = RANDOM.integers(-(1 << 15), 1 << 15, (ROWS, 2, grid.halves)).astype(np.int16)
    if kind == "iq1_m":
        # the quarters of a scale in the highest bits of four halves
        scale = np.array(0.01, np.float16).view(np.int16)
        quarters = (scale >> 4 * np.arange(4) & 15) << 12
        halves[..., :4] = (halves[..., :4] & 0x0FFF) | quarters.astype(np.uint16).view(np.int16)
    else:
        halves[..., 0] = np.array(0.01, np.float16).view(np.int16)
    halves = halves.reshape(ROWS, -1)
    meant = grids.decode(packed, torch.from_numpy(halves), kind).numpy()
    x = RANDOM.standard_normal((tokens, width)).astype(np.float32)
    rounded = rounded_to(activation_bits, x.reshape(tokens, groups, group)).reshape(tokens, width)
    expected = rounded @ meant.T

    code_at, half_at, x_at = machine.put(packed.numpy().T), machine.put(halves.T), machine.put(x)
    stride, index = width * spec.act_nbytes, machine.put(np.arange(tokens))
    acts, scales, sums = machine.room(np.int8, tokens, stride), *(machine.room(np.float32, tokens, groups) for _ in range(2))
    for t in range(tokens):
        offset = 4 * t * groups
        machine.run(prepare_token, (form,), x_at + 4 * t * width, groups, acts + t * stride, scales + offset, sums + offset)
    rest = acts, stride, scales, sums, index, groups
    for count in (1, 2):
        out = machine.room(np.float32, tokens, ROWS)
        machine.run(rows_times_tokens, (form, count, 0), code_at, half_at, 0, *rest, out, 4 * ROWS)
        check_close(machine.get(out, np.float32, count, ROWS), expected[:count], 1e-5, f"{what}, {count} tokens")
    if not spec.lowest_precision:
        return
    ready, wide = machine.room(np.uint8, ROWS, width * spec.unpacked_nbytes), machine.room(np.float32, groups, ROWS)
    machine.run(unpack_rows, (form,), code_at, half_at, groups, ready)
    machine.run(widen_scales, (form,), code_at, half_at, groups, wide, wide)
    again, tile = machine.room(np.float32, 8, ROWS), machine.room(np.int8, tile_nbytes(spec, width))
    machine.run(gather_tile, (form, 8), acts, stride, scales, sums, index, groups, tile, tokens - 1)
    machine.run(rows_times_tile, (form, 8, 1), ready, wide, wide, tile, groups, again, 4 * ROWS, tokens - 1)
    check_close(machine.get(again, np.float32, tokens, ROWS), expected, 1e-5, f"{what}, unpacked")


def level_of(bits: int) -> np.ndarray:
    from auraflux.ops.turboquant.codebook import index_of_rank, normal_levels

    levels = np.empty(1 << bits)
    levels[index_of_rank(bits).numpy()] = normal_levels(bits)
    return levels


def check_scores(machine: Machine, bits: int, tile: int) -> None:
    """Check attention scores of a tile of heads, from packed codes and from transposed levels."""
    from numba import njit

    from auraflux.ops.simd.compile.compiler import FAST, OPTIONS, KernelCompiler
    from auraflux.ops.turboquant.cpu.int8.codebook import CODES, KEY_UNITS
    from auraflux.ops.turboquant.cpu.int8.key_scores import key_score_loop, transpose_key_loop, transposed_score_loop
    from auraflux.ops.turboquant.cpu.int8.rounding import spread_query
    from auraflux.ops.turboquant.cpu.int8.tiles import room_of

    width, groups, wide = 128, 16, CODES[bits].wide
    tokens, quads = 4 * groups, width * wide // 128
    level, norms = level_of(bits), RANDOM.uniform(0.5, 2, tokens).astype(np.float32)
    # half of the codes normally distributed, half uniform
    codes = np.abs(RANDOM.standard_normal((tokens, width, 1)) - level).argmin(2)
    codes[::2] = RANDOM.integers(0, 2**bits, codes[::2].shape)
    q = RANDOM.standard_normal((tile, width)).astype(np.float32)
    expected = q @ (level[codes] * norms[:, None]).T
    words = packed(codes, wide)
    rows = machine.put(words)
    where = machine.put(rows + words.shape[1] * 4 * np.arange(tokens))
    q_at, laid = machine.put(q), machine.room(np.int8, 2 * width * room_of(tile))
    units, excess = np.empty(tile, np.float32), np.empty(tile, np.int32)
    rounded = np.empty(2 * width, np.int32)
    spread = njit(pipeline_class=KernelCompiler, fastmath=FAST, **OPTIONS)(spread_query.py_func)
    for h in range(tile):
        query, target = machine.here(q_at) + 4 * h * width, machine.here(laid)
        worth, over = spread(query, width, wide, room_of(tile), h, target, rounded.ctypes.data)
        units[h], excess[h] = worth * KEY_UNITS[bits], over
    norm_at, unit_at, excess_at = machine.put(norms), machine.put(units), machine.put(excess)
    out, step = machine.room(np.float32, tile, tokens), 4 * tokens
    ends = unit_at, excess_at, out, step
    machine.run(key_score_loop, (bits,), tile, where, groups, quads, norm_at, laid, *ends, 0, 0, 0, 0)
    found = machine.get(out, np.float32, tile, tokens)
    check_close(found[:, ::2], expected[:, ::2], 1e-2, f"scores k{bits}, {tile} heads, any codes")
    check_close(found[:, 1::2], expected[:, 1::2], 1e-2, f"scores k{bits}, {tile} heads")
    planes = len(CODES[bits].tables)
    key_step = planes * 4 * width
    levels = machine.room(np.uint8, groups * key_step)
    machine.run(transpose_key_loop, (bits,), where, groups, quads, levels, key_step)
    machine.run(transposed_score_loop, (bits,), tile, levels, key_step, groups, width // 4, norm_at, laid, *ends)
    assert np.array_equal(machine.get(out, np.float32, tile, tokens), found), "scores of transposed levels differ"


def check_values(machine: Machine, bits: int, tile: int) -> None:
    """Check products of 16-bit attention weights and quantized values."""
    from auraflux.ops.turboquant.cpu.int8.codebook import CODES
    from auraflux.ops.turboquant.cpu.int8.value_sums import add_value_loop, spread_weights, transpose_values

    code, width, groups = CODES[bits], 64, 4
    tokens, columns, step = 4 * groups, width * code.wide // 32, 16 * groups
    codes = RANDOM.integers(0, 2**bits, (tokens, width))
    high, low = RANDOM.integers(0, 128, (2, tile, tokens))
    tables = np.array(code.tables)[:, codes]
    expected = (128 * high + low) @ tables[0] + (high @ tables[1] if len(tables) > 1 else 0)
    words = packed(codes, code.wide)
    rows = machine.put(words)
    where = machine.put(rows + words.shape[1] * 4 * np.arange(tokens))
    weights = machine.put(np.stack([high, low], 1).astype(np.uint8))
    turned, spread = machine.room(np.uint8, 4 * columns * step), machine.room(np.uint8, groups * tile * 2 * 16)
    decays, gains = machine.put(np.full(tile, 0.5, np.float32)), machine.put(np.full(tile, 2.0, np.float32))
    sums = machine.put(np.ones((columns, code.vectors, tile, 4), np.float32))
    machine.run(transpose_values, (), where, groups, width * code.wide // 128, turned, step)
    machine.run(spread_weights, (), tile, weights, tokens, groups, spread)
    machine.run(add_value_loop, (bits,), tile, turned, step, groups, columns, spread, decays, gains, sums)
    found = machine.get(sums, np.float32, columns, code.vectors, tile, 4).transpose(2, 0, 3, 1).reshape(tile, width)
    # low bytes of mirrored levels differ by the omitted product with low weights
    check_close(found, 2.0 * expected + 0.5, 1e-6 if bits == 4 else 1e-4, f"values v{bits}, {tile} heads")


def check_softmax(machine: Machine) -> None:
    from auraflux.ops.turboquant.cpu.int8.rounding import block_top, block_weights

    groups = 4
    scores, norms = RANDOM.standard_normal(4 * groups).astype(np.float32), RANDOM.uniform(0.5, 1, 4 * groups).astype(np.float32)
    scores[3] = np.nan
    score_at, norm_at, found = machine.put(scores), machine.put(norms), machine.room(np.float32, 4)
    machine.run(block_top, (), score_at, groups, found)
    top = float(np.nanmax(scores))
    assert machine.get(found, np.float32, 1)[0] == np.float32(top), "the highest score"
    scores[3] = -200.0
    score_at = machine.put(scores)
    high, low = machine.room(np.uint8, 4 * groups), machine.room(np.uint8, 4 * groups)
    machine.run(block_weights, (), score_at, groups, top, 0.0, norm_at, 16000.0, high, low, found)
    weights = np.exp(scores.astype(float) - top)
    check_close(machine.get(found, np.float32, 2), np.array([weights.sum(), weights @ norms]), 1e-4, "sums of weights")
    steps = 128 * machine.get(high, np.uint8, 4 * groups).astype(int) + machine.get(low, np.uint8, 4 * groups)
    check_close(steps, 16000 * weights * norms, 1e-4, "weights")


def main(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(name, Path(folder))
        for bits in (2, 3, 4, 5, 6, 8):
            for activation_bits in (8, 16, 32):
                check_linear(machine, bits, activation_bits=activation_bits)
        for bits, tile in ((8, 4), (8, 1), (6, 2), (4, 4), (4, 3), (4, 2)):
            check_scores(machine, bits, tile)
        for bits, tile in ((4, 4), (4, 3), (4, 1), (8, 2)):
            check_values(machine, bits, tile)
        check_softmax(machine)
        for bits, group, kind in ((6, 16, "centred"), (3, 16, "centred"), (2, 16, "f32"), (4, 32, "iq4"), (4, 16, "nvfp4")):
            check_linear(machine, bits, group, kind)
        for kind in ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"):
            for activation_bits in (8, 16, 32):
                check_grid(machine, kind, activation_bits)


if __name__ == "__main__":
    main(sys.argv[1])
