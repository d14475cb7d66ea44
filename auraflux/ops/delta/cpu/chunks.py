"""The delta rule over one sequence in chunks of tokens: README.md has the derivation, `chunk_tiles` the matrix products.

The state is held in panels, strips of columns that stay in the first cache while a chunk works on them: columns of the state do
not meet. Everything is padded with zeros to whole chunks and panels, which then change nothing.
"""

import numpy as np

from auraflux.ops.delta.cpu.chunk_tiles import (
    BLOCK_BYTES,
    CHUNK,
    KEY_BYTES,
    LANES,
    PANEL,
    ROWS,
    add_writes,
    decay_pairs,
    multiply_keys,
    read_panel,
    solve,
    transpose,
    update_panel,
)
from auraflux.ops.simd.jit import floats, jit

ZERO, ONE = np.float32(0), np.float32(1)
PAIRS, GATES = 2 * CHUNK * CHUNK, 4 * CHUNK


@jit
def padded(n, step):
    return (n + step - 1) // step * step


@jit
def scratch_floats(key_width, value_width, count):
    """How much scratch `run_chunks` needs for `count` value heads."""
    depth = padded(key_width, ROWS)
    return depth * 2 * CHUNK + 2 * PAIRS + GATES + 4 * CHUNK * PANEL + count * depth * padded(value_width, PANEL)


@jit
def _load_keys(source, step, n, width, keys):
    """Lay a chunk's keys or queries out with tokens as the fast axis, zeros after the last."""
    whole = width - width % LANES if n == CHUNK else 0
    for token in range(0, CHUNK, LANES):
        for c in range(0, whole, LANES):
            transpose(source + 4 * (token * step + c), step, keys + c * KEY_BYTES + 4 * token)
    for c in range(whole, width):
        row = floats(keys + c * KEY_BYTES, CHUNK)
        for token in range(n):
            row[token] = floats(source + 4 * (token * step + c), 1)[0]
        for token in range(n, CHUNK):
            row[token] = ZERO


@jit
def _load_gates(decay, beta, step, n, gates_at):
    gates, decays, betas = floats(gates_at, GATES), floats(decay, n * step), floats(beta, n * step)
    for token in range(n):
        gates[token], gates[CHUNK + token] = decays[token * step], betas[token * step]
    for token in range(n, CHUNK):
        gates[token], gates[CHUNK + token] = ONE, ZERO


@jit
def _copy(source_at, source_step, target_at, target_step, rows, width):
    for row in range(rows):
        source, target = floats(source_at + 4 * row * source_step, width), floats(target_at + 4 * row * target_step, width)
        for j in range(width):
            target[j] = source[j]


@jit
def _clear(target_at, n):
    target = floats(target_at, n)
    for i in range(n):
        target[i] = ZERO


@jit
def _pack(state, panels, key_width, value_width, depth, back):
    """Copy one head's state to its panels, or back."""
    for column in range(0, value_width, PANEL):
        here, panel, width = state + 4 * column, panels + 4 * depth * column, min(PANEL, value_width - column)
        if back:
            _copy(panel, PANEL, here, value_width, key_width, width)
        else:
            _copy(here, value_width, panel, PANEL, key_width, width)


@jit
def _run_panel(keys, pairs, gates, panel, v, out, step, n, width, key_width, rows):
    """Take one panel through a chunk of n tokens, reading `width` values of each and writing as many outputs."""
    whole = n == CHUNK and width == PANEL
    spare = rows + 3 * BLOCK_BYTES
    values, values_step, outs, outs_step = (v, step, out, step) if whole else (spare, PANEL, spare, PANEL)
    if not whole:
        _clear(spare, CHUNK * PANEL)
        _clear(rows, CHUNK * PANEL)
        _copy(v, step, spare, PANEL, n, width)
    read_panel(keys, 0, n, panel, key_width, rows)
    read_panel(keys, CHUNK, n, panel, key_width, rows)
    solve(pairs, gates, values, values_step, rows)
    add_writes(pairs, gates, n, rows, outs, outs_step)
    if not whole:
        _copy(spare, PANEL, out, step, n, width)
    update_panel(keys, gates, n, rows, panel, key_width)


@jit
def run_chunks(inputs, n, first, count, sizes, scratch):
    """Take a sequence's n tokens through `count` value heads from `first` on."""
    state, q, k, v, decay, beta, out = inputs
    _, heads, key_heads, key_width, value_width = sizes
    shared, depth, head = heads // key_heads, padded(key_width, ROWS), 4 * key_width * value_width
    key_step, value_step, panels_step = key_heads * key_width, heads * value_width, 4 * depth * padded(value_width, PANEL)
    keys = scratch
    products = keys + depth * KEY_BYTES
    pairs = products + 4 * PAIRS
    gates = pairs + 4 * PAIRS
    rows = gates + 4 * GATES
    panels = rows + 4 * BLOCK_BYTES - first * panels_step

    if key_width % ROWS or value_width % PANEL:
        # what pads the keys and panels stays zero from here on
        _clear(scratch, scratch_floats(key_width, value_width, count))
    for h in range(first, first + count):
        _pack(state + h * head, panels + h * panels_step, key_width, value_width, depth, False)
    for start in range(0, n, CHUNK):
        size = min(CHUNK, n - start)
        for h in range(first, first + count):
            if h == first or h % shared == 0:
                here = 4 * (start * key_step + h // shared * key_width)
                _load_keys(k + here, key_step, size, key_width, keys)
                _load_keys(q + here, key_step, size, key_width, keys + 4 * CHUNK)
                multiply_keys(keys, key_width, products)
            gate = 4 * (start * heads + h)
            _load_gates(decay + gate, beta + gate, heads, size, gates)
            decay_pairs(products, gates, pairs)
            for column in range(0, value_width, PANEL):
                panel, width = panels + h * panels_step + 4 * depth * column, min(PANEL, value_width - column)
                row = 4 * (start * value_step + h * value_width + column)
                _run_panel(keys, pairs, gates, panel, v + row, out + row, value_step, size, width, key_width, rows)
    for h in range(first, first + count):
        _pack(state + h * head, panels + h * panels_step, key_width, value_width, depth, True)
