"""Adapters in the launch of a product on Hopper, on numpy: the first programs shrink, and all add."""

from itertools import accumulate

import numpy as np
import pytest
import torch

from auraflux.ops._cases import relative_rms

pytest.importorskip("triton")
from auraflux.ops.gpu.blocks.codes import Codes
from auraflux.ops.linear.adapters import Adapters
from auraflux.ops.linear.cuda.adapted import Adapted, adapted_of
from auraflux.ops.linear.cuda.call import NO_NORM, FusedNorm
from auraflux.ops.linear.cuda.matvec.int4 import matvec, operands
from auraflux.ops.linear.cuda.row_copies import Product
from auraflux.ops.lora.inputs import LinearInput
from auraflux.ops.lora.reference import lora_gate_up, lora_linears
from tests.emulator.ptx import Address, Device, Lanes, Machine
from tests.ops.linear.test_hopper import nothing, weight_of

EPS, WARPS, DEEP, PROCESSORS, TOL = 1e-6, 2, 3, 4, 8e-3


class Counter:
    """Programs that have counted. They run one after the other: twice, since the first wait for sums of later ones."""

    def __init__(self, adapted: Adapted):
        self.programs, self.counted = adapted.programs, 0

    def count_up(self, adapted: Adapted, lane: object, there: np.ndarray) -> None:
        self.counted += int(np.sum(there))

    def stand_ins(self, device: Device) -> dict[str, object]:
        """Return what takes the place of waiting and counting: a launch has the first half of the sums."""
        load, half = Machine(device, 1).load, np.zeros(1, np.int32).view(Lanes)

        def awaited(at: Address, which: np.ndarray, count: int, step: int) -> tuple[Lanes, ...]:
            return tuple(load(at + n * step, (which >> n & 1).astype(bool), 0.0) for n in range(count))

        return {"count_up": self.count_up, "_half": lambda adapted, lane: half, "_awaited": awaited}

    def check(self) -> None:
        """Require that every program counted once, which takes the counter to the next launch's half."""
        assert self.counted == 2 * (self.programs or 0)


def on(device: Device, adapted: Adapted) -> Adapted:
    def put(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return device.put(value)
        return tuple(map(put, value)) if isinstance(value, tuple) else value

    return Adapted(*map(put, adapted))  # type: ignore[arg-type]


def adapters_of(width: int, rows: list[int], ranks: tuple[int, ...], slots: list[int], count: int = 3) -> Adapters:
    a = [(torch.randn(count, rank, width) / width**0.5).bfloat16() if rank else None for rank in ranks]
    b = [torch.randn(count, rank, n).bfloat16() if rank else None for rank, n in zip(ranks, rows, strict=True)]
    return Adapters(torch.tensor(slots, dtype=torch.int32), a, b)


def inputs_of(tokens: int, width: int, kind: str) -> LinearInput:
    x, delta, norm = torch.randn(tokens, width).bfloat16(), torch.randn(tokens, width).bfloat16(), torch.rand(width) + 0.5
    return {"plain": LinearInput(x), "normed": LinearInput(x, None, norm, EPS), "summed": LinearInput(x, delta, norm, EPS)}[
        kind
    ]


def multiply(inputs: LinearInput, weights: list, adapters: Adapters, gated: bool, tiles: int) -> list[torch.Tensor]:
    """Run every program of `matvec`."""
    device, width, rows = Device(), weights[0].shape[1], [weight.shape[0] for weight in weights]
    outs = [device.put(nothing(1, count)) for count in (rows[:1] if gated else rows)]
    total, delta = device.put(nothing(1, width)), device.put(inputs.delta)
    normed = NO_NORM if inputs.norm is None else FusedNorm(delta, device.put(inputs.norm), total, EPS)  # type: ignore[arg-type]
    codes = [Codes(*(device.put(part) for part in operands(weight))) for weight in weights]  # type: ignore[arg-type]
    products = tuple(Product(each, out) for each, out in zip(codes, [*outs, None], strict=False))  # type: ignore[arg-type]
    ends = tuple(accumulate(count // ((8 if gated else 16) * tiles) for count in rows[: len(outs)]))
    adapted, share = adapted_of(adapters, rows, width, 1, WARPS, ends[-1], (min(ends[-1], PROCESSORS), 1))
    counter, operand, x = Counter(adapted), on(device, adapted), device.put(inputs.x)
    stand_ins = counter.stand_ins(device)
    for program in [*range(ends[-1])] * 2:
        run = Machine(device, WARPS, program).program(matvec, **stand_ins)
        run(x, normed, products, ends[:-1], operand, gated, width, tiles, WARPS, DEEP, share)
    counter.check()
    return [device.get(out, nothing(1, count)) for out, count in zip(outs, rows, strict=False)]


@pytest.mark.parametrize(
    ("width", "rows", "ranks", "tiles", "kind", "slot"),
    [
        (512, [64, 32, 32], (16, 0, 5), 1, "summed", 2),
        (768, [32], (33,), 2, "plain", 0),
        (1280, [32, 32], (3, 64), 1, "normed", 1),
        (512, [32], (16,), 1, "plain", -1),
    ],
)
def test_one_token(width: int, rows: list[int], ranks: tuple[int, ...], tiles: int, kind: str, slot: int):
    torch.manual_seed(0)
    inputs, weights = inputs_of(1, width, kind), [weight_of(n, width, 4, 64) for n in rows]
    adapters = adapters_of(width, rows, ranks, [slot])
    _, wanted = lora_linears.reference(inputs, weights, adapters)
    for found, want in zip(multiply(inputs, weights, adapters, False, tiles), wanted, strict=True):
        assert relative_rms(found, want) < TOL


@pytest.mark.parametrize(("tiles", "ranks"), [(1, (16, 16)), (2, (5, 0))])
def test_gate_and_up(tiles: int, ranks: tuple[int, int]):
    torch.manual_seed(0)
    inputs, (gate, up) = inputs_of(1, 768, "summed"), (weight_of(32, 768, 4, 64) for _ in range(2))
    adapters = adapters_of(768, [32, 32], ranks, [1])
    (found,) = multiply(inputs, [gate, up], adapters, True, tiles)
    assert relative_rms(found, lora_gate_up.reference(inputs, gate, up, adapters)[1]) < 2 * TOL
