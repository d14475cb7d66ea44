"""Products by tiles of tokens on Hopper, without one: tokens are in the order in which codes are taken apart; plans fit."""

import types

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from auraflux.ops.linear import _by_tiles, _hopper_tiles
from auraflux.quant.packing import unpack
from tests.ops.emulated import Pointer, Program, Tensor


class Shaped(Tensor):
    def reshape(self, *shape: int) -> "Shaped":
        return Shaped(self.data.reshape(shape))

    def permute(self, *order: int) -> "Shaped":
        return Shaped(self.data.transpose(order))


def run(kernel, *args, ids: tuple[int, ...] = (0, 0, 0)):
    """Call a kernel's Python with numpy in place of the language."""
    language = Program(ids)
    language.join = lambda a, b: Shaped(np.stack([a.data, b.data], -1))
    language.split = lambda x: (Shaped(x.data[..., 0]), Shaped(x.data[..., 1]))
    nothing = {"gdc_wait": lambda: None, "gdc_launch_dependents": lambda: None}
    function = getattr(kernel, "fn", kernel)
    return types.FunctionType(function.__code__, {**function.__globals__, "gl": language, "tl": language, **nothing})(*args)


@pytest.mark.parametrize(("bits", "block"), [(4, 256), (4, 128), (8, 128)])
def test_tokens_are_in_the_order_of_codes(bits: int, block: int):
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(-(2**31), 2**31, (16, block * bits // 32), dtype=torch.int32, generator=generator)
    codes = unpack(packed, bits).numpy()
    inputs, ordered = np.arange(block, dtype=np.float32), np.full(block, -1, np.float32)
    run(_hopper_tiles.order_tokens, Pointer(inputs), Pointer(ordered), 1, block, block, bits, 1, block, block)
    words = run(_hopper_tiles._words, Shaped(packed.numpy()), block)
    for n, some in enumerate(words):
        for j in range(4):
            plane = j * 4 // bits
            found = run(_hopper_tiles._beside, some, j, None).data >> (bits * plane + 16 * (np.arange(16) % 2))
            places = ordered[n * 64 + j * 16 :][:16].astype(int)
            assert ((found & ((1 << bits) - 1)) == codes[:, places]).all()
    assert (np.sort(ordered) == inputs).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tokens", [2, 17, 33, 65, 129, 1000])
@pytest.mark.parametrize(("rows", "width"), [(1, 32), (8192, 8192), (256000, 4096), (64, 65536)])
def test_plans_fit(bits: int, tokens: int, rows: int, width: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_by_tiles, "multiprocessors", lambda device: 132)
    tile, block, stages, shares = _by_tiles._plan(tokens, [rows], width, bits, torch.device("cpu"))
    assert stages >= 3
    assert stages * (_by_tiles.ROWS * block * bits // 8 + block * tile * 2) <= 221 << 10
    assert 1 <= shares <= max(1, -(-width // block))
