"""Chunks of the delta rule by cp.async and mma.sync, without a GPU: decays, products, ends inside of chunks."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from auraflux.ops._cases import all_cases, relative_rms
from auraflux.ops.delta.cuda.mma import prefill
from auraflux.ops.delta.reference import gated_delta_prefill
from tests.emulator.gluon import Tensor, launch


def inverse(a: Tensor, *memory: Any) -> Tensor:
    return Tensor(np.linalg.inv(np.eye(64) - np.tril(a.data.astype(np.float64), -1)).astype(np.float32))


def running_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    return Tensor(np.cumsum(x.data)), Tensor(x.data.sum())


# what is PTX in the kernels
STAND_INS = {
    "_inverse": inverse, "running_sums": running_sums, "exp2": lambda x: Tensor(np.exp2(x.data)),
    "log2": lambda x: Tensor(np.log2(x.data)), "range": lambda *ends: (Tensor(np.int32(i)) for i in range(*map(int, ends))),
}  # fmt: skip


class Side(nullcontext[None]):
    def join(self) -> None:
        pass


@pytest.mark.parametrize(
    "name",
    ["bf16-chunks", "bf16-one-sequence", "bf16-closed-gates", pytest.param("bf16-many-ragged", marks=pytest.mark.slow)],
)
def test_prompts(monkeypatch: pytest.MonkeyPatch, name: str):
    def launched(kernel: Any, grid: tuple[int, ...]) -> Any:
        return lambda *args, num_warps: launch(kernel, grid, *args[:-1], SHAPE=args[-1], stand_ins=STAND_INS)

    monkeypatch.setattr(prefill, "launch", launched)
    monkeypatch.setattr(prefill, "side_stream", lambda device, wanted: Side())
    monkeypatch.setattr(prefill, "segments_for", lambda *sizes: 2)
    case = next(each for each in all_cases() if each.op is gated_delta_prefill and each.name == name)
    args = case.args()
    theirs = {key: value.clone() for key, value in args.items()}
    expected, out = gated_delta_prefill.reference(**theirs), torch.full_like(args["v"], float("nan"))
    prefill.prefill_mma(**args, out=out)
    assert relative_rms(out, expected) <= case.tol
    assert relative_rms(args["state"], theirs["state"]) <= case.tol
