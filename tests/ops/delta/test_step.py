"""A delta layer's step without clusters, without a GPU: programs of a key head share inputs, and the last overwrites them."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from auraflux.ops._cases import relative_rms
from auraflux.ops.delta.cases import layer_inputs
from auraflux.ops.delta.cuda import decode
from auraflux.ops.delta.reference import delta_layer_step
from tests.emulator.gluon import launch


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 1), (2, 2)])
def test_shared_inputs(monkeypatch: pytest.MonkeyPatch, heads: int, key_heads: int):
    def launched(kernel: Any, grid: tuple[int, ...]) -> Any:
        return lambda *args, num_warps, num_ctas, launch_pdl: launch(kernel, grid, *args[:-1], SHAPE=args[-1])

    readers = torch.zeros(decode.MOST_KEY_HEADS, dtype=torch.int32)
    monkeypatch.setattr(decode, "launch", launched)
    monkeypatch.setattr(decode, "readers_of", lambda device: readers)
    torch.manual_seed(heads)
    args = layer_inputs(2, heads, key_heads)
    theirs = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in args.items()}
    expected, out = delta_layer_step.reference(**theirs), torch.full_like(args["z"], float("nan"))
    decode.run_layer_step(**{key: value for key, value in args.items() if key != "starts"}, out=out)
    assert relative_rms(out, expected) <= 1e-2
    assert relative_rms(args["state"], theirs["state"]) <= 1e-2
    assert (args["conv"] == theirs["conv"]).all()
    assert not readers.any()
