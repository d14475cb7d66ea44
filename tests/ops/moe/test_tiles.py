"""Grouped wgmma on Hopper, without one: hidden values are stored in the permuted order of the codes."""

import numpy as np
import pytest

pytest.importorskip("triton")

from auraflux.ops.moe.cuda.gemm import grouped_wgmma as wgmma
from tests.emulator.gluon import STILL, Pointer, Program, Tensor
from tests.emulator.rebind import rebound


class Halves(Pointer):
    def to(self, dtype) -> Pointer:
        return Pointer(self.memory.view(dtype), self.offset // 2)


def run(kernel, *args):
    """Call a kernel's Python with numpy in place of Gluon; float16 stands in for bf16."""
    language = Program()
    language.bfloat16, language.int16, language.pointer_type = np.float16, np.int16, lambda kind: kind
    return rebound(kernel, language, **STILL)(*args)


@pytest.mark.parametrize(("rows", "tile"), [(128, 32), (256, 128)])
@pytest.mark.parametrize("part", [1, 2])
def test_hidden_values_are_in_permuted_order(rows: int, tile: int, part: int):
    """Store hidden values of two K blocks by several programs, for all places of a block or half of them."""
    inner, places = 512, tile // part
    generator = np.random.default_rng(0)
    gate, up = (generator.standard_normal((inner, places), np.float32) for _ in range(2))
    hidden = (gate / (1 + np.exp(-gate)) * up).astype(np.float16)
    out = np.full((inner // 64, tile, 64), np.nan, np.float16)
    for row0 in range(0, inner, rows // 2):
        mine = slice(row0, row0 + rows // 2)
        both = np.stack([gate[mine].reshape(-1, 8, places), up[mine].reshape(-1, 8, places)], 1).reshape(rows, places)
        run(wgmma._store_hidden, Tensor(both), Halves(out.reshape(-1)), row0, tile, 4)
    wanted = run(wgmma._ordered, Tensor(hidden.T), 256).data
    assert (out[:, :places].transpose(1, 0, 2).reshape(places, inner) == wanted).all()
    assert np.isnan(out[:, places:]).all()
