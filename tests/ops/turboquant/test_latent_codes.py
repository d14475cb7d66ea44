"""Levels of coded latents lie where the tensor cores read them: the PTX of the decoding warps, on numpy."""

import numpy as np
import pytest
import torch

from auraflux.ops.turboquant.codebook import codebook
from auraflux.ops.turboquant.cuda.mla import lookup as parts
from tests.emulator import ptx

BASE, TABLE_NBYTES = 1024, 32768


def signed_bytes(a: np.ndarray, b: np.ndarray, how: np.ndarray) -> np.ndarray:
    """Choose bytes; a number from 8 on means the sign of a byte, eight times."""
    found = np.zeros_like(a)
    for k in range(4):
        n = how[0] >> 4 * k & 15
        byte = (a if n % 8 < 4 else b) >> 8 * (n % 4) & 255
        found |= (np.where(byte > 127, 255, 0) if n > 7 else byte) << 8 * k
    return found


def run(machine: ptx.Machine, text: str, outs: int, *args) -> tuple:
    text = text.replace(", ", ",").replace(" + ", "+")
    return machine.inline_asm_elementwise(text, "=r," * outs, args, (np.int32,) * outs, False, 1)


@pytest.mark.parametrize("positions", [32, 64])
@pytest.mark.parametrize(("bits", "rows"), [(4, 4), (8, 2), (8, 4)])
def test_levels_lie_where_the_matrix_units_read_them(bits, rows, positions, monkeypatch):
    monkeypatch.setitem(ptx.INSTRUCTIONS, "prmt.b32", signed_bytes)
    monkeypatch.setitem(ptx.INSTRUCTIONS, "add.u32", lambda a, b: a + b)
    monkeypatch.setitem(ptx.INSTRUCTIONS, "xor.b32", lambda a, b: a ^ b)
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (positions, 64 * bits), dtype=torch.uint8)
    device, warps, nbytes = ptx.Device(), positions // 8, 64 * bits * rows
    machine = ptx.Machine(device, warps, 0)
    table = parts.table_for(bits, 512, torch.device("cpu")).numpy()
    machine.memory[BASE : BASE + TABLE_NBYTES] = np.repeat(table, 32).view(np.uint8)
    warp, lane = np.divmod(np.arange(32 * warps), 32)
    source, ring = device.put(codes).at + warp * 512 * bits + lane * 16, BASE + 131072 + warp * nbytes
    tile, swizzle = BASE + TABLE_NBYTES + lane // 8 * (positions * 128) + warp * 1024, lane % 8 * 16
    for piece in range(8 // rows):
        run(machine, parts._copy_ptx(nbytes), 1, ring + lane * 16, source + piece * nbytes, 1)
        words = run(machine, parts._read_ptx(bits, rows, 0), bits * rows // 2, ring + lane * bits)
        text = parts._write_ptx(bits, rows, piece * rows, positions)
        run(machine, text, 1, *words, lane * 0x04040404, BASE, tile, swizzle)
    levels = (codebook(bits, 512) * 512**0.5).half()
    wanted = levels[(codes[..., None] >> torch.arange(0, 8, bits) & (1 << bits) - 1).flatten(1).long()].view(positions, 8, 8, 8)
    found = machine.memory[BASE + TABLE_NBYTES :][: positions * 1024].view(np.float16).reshape(8, positions, 8, 8)
    for row in range(positions):
        # blocks of 64 channels, 16 bytes at a time in an order of each row's own
        np.testing.assert_array_equal(found[:, row, np.arange(8) ^ row % 8], wanted[row].numpy())
