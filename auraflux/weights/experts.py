"""The experts of a mixture layer, however a checkpoint lays them out.

one each     experts.7.gate_proj.weight [I, H]                Hugging Face until 4.x, DeepSeek
fused        experts.gate_up_proj [E, 2I, H]                  Hugging Face 5.x
alternating  experts.gate_up_proj [E, H, 2I], gate and up in turn; as MXFP4 [E, 2I, H]      gpt-oss
stacks       switch_mlp.gate_proj.weight [E, I, H]            mlx-lm; `experts` for its gpt-oss, `switch_glu` for Gemma 4

Experts without a gate have up and down alone; those of one tensor are experts.up_proj [E, I, H].
"""

from collections.abc import Callable

import torch
from torch import Tensor

from auraflux.ops.moe.experts import Activation, Clamp, Experts, Gelu, ReluSquare
from auraflux.quant import QTensor
from auraflux.weights.balanced import Balanced
from auraflux.weights.divided import Divided, Joined, alone_sum, by_expert
from auraflux.weights.loader import Source, Weights, dense
from auraflux.weights.slices import Slices
from auraflux.weights.stored import Stored
from auraflux.weights.streamed import LayerExperts, Resident, Streamed

EVEN, ODD = slice(0, None, 2), slice(1, None, 2)


def load_experts(
    weights: Weights, name: str, count: int, hidden: int, inner: int, activation: Activation | None = None
) -> LayerExperts:
    """Take the experts under `name` from a checkpoint of any layout, or from where it was packed.

    activation  a checkpoint with gpt-oss's has biases too
    """
    home, alone = f"{name}.{stacks_of(activation)}", f"{name}.experts"
    clamped, division, slices = isinstance(activation, Clamp), weights.division, weights.slices
    gated = not isinstance(activation, ReluSquare)
    if weights.experts is not None:
        biases = _biases(weights, name, home, count, hidden, inner) if clamped else {}
        kept = weights.experts.layer(name, count, hidden, inner, biases, activation)
        if not slices.whole:
            # a file has experts one after the other, whole
            return Joined(Divided(kept, by_expert(slices).share(count), 0, alone_sum), slices.join)
        if division is None:
            return kept
        if division.balance is not None and isinstance(kept, Streamed):
            return Balanced(kept, division.balance)
        return Divided(kept, division.share(count), 0, division.join)
    if weights.has(f"{home}.{'gate' if gated else 'up'}_proj.weight"):
        sources = _stacks(weights, home, count, hidden, inner, gated)
    elif not gated and weights.has(f"{alone}.up_proj"):
        sources = _fused_ungated(weights, alone, count, hidden, inner)
    elif not weights.has(f"{alone}.gate_up_proj"):
        sources = _one_each(weights, alone, hidden, inner, gated)
    elif not clamped:
        sources = _fused(weights, alone, count, hidden, inner)
    else:
        sources = _alternating(weights, alone, count, hidden, inner)
    columns: range | None = None
    if not slices.whole:
        first = sources["down"].matrix(0)
        group = slices.group(first, weights.rounds_in)
        if slices.even(inner, group):
            columns = slices.columns(inner, group, f"{home}.down_proj")
            sources = {
                kind: source.cut(None, columns) if kind == "down" else source.cut(columns, None)
                for kind, source in sources.items()
            }
        else:
            division = by_expert(slices)
    share = range(count) if division is None else division.share(count)
    made = {
        kind: weights.stack(f"{home}.{kind}_proj.weight", len(share), source.after(share.start))
        for kind, source in sources.items()
    }
    weights.release(f"{alone}.gate_up_proj", f"{alone}.up_proj", f"{alone}.down_proj")
    biases = _biases(weights, name, home, count, hidden, inner) if clamped else {}
    biases = {kind: value[share.start : share.stop].contiguous() for kind, value in biases.items()}
    if columns is not None:
        biases = {kind: _some_bias(kind, value, columns, slices) for kind, value in biases.items()}
    if division is not None:
        # other ranks have the others
        weights.skip_under(f"{alone}.")
    resident = Resident(Experts(made.get("gate"), made["up"], made["down"], **biases, activation=activation))
    found = resident if division is None else Divided(resident, share, share.start, division.join)
    return found if slices.whole else Joined(found, slices.join)


def _some_bias(kind: str, value: Tensor, columns: range, slices: Slices) -> Tensor:
    """The bias of some columns; that of the result is one rank's."""
    if kind == "down_bias":
        return value if slices.first else torch.zeros_like(value)
    return value[:, columns.start : columns.stop].contiguous()


def stacks_of(activation: Activation | None) -> str:
    """What mlx-lm calls the stacks of experts: it has another name where they have another activation."""
    match activation:
        case Clamp():
            return "experts"
        case Gelu():
            return "switch_glu"
    return "switch_mlp"


def _stacks(weights: Weights, home: str, count: int, hidden: int, inner: int, gated: bool) -> dict[str, Source]:
    def source(kind: str, rows: int, width: int) -> Source:
        name = f"{home}.{kind}_proj.weight"
        return Source(lambda e: weights.one_of(name, e, count, rows, width), lambda e: weights.release(name))

    return _projections(source, hidden, inner, gated)


def _projections(source: Callable[[str, int, int], Source], hidden: int, inner: int, gated: bool) -> dict[str, Source]:
    first = {kind: source(kind, inner, hidden) for kind in (("gate", "up") if gated else ("up",))}
    return {**first, "down": source("down", hidden, inner)}


def _one_each(weights: Weights, alone: str, hidden: int, inner: int, gated: bool) -> dict[str, Source]:
    def source(kind: str, rows: int, width: int) -> Source:
        def name(expert: int) -> str:
            return f"{alone}.{expert}.{kind}_proj.weight"

        return Source(lambda e: weights.stored(name(e), rows, width), lambda e: weights.release(name(e)))

    return _projections(source, hidden, inner, gated)


def _fused_ungated(weights: Weights, alone: str, count: int, hidden: int, inner: int) -> dict[str, Source]:
    def source(kind: str, rows: int, width: int) -> Source:
        name = f"{alone}.{kind}_proj"
        return Source(lambda e: weights.one_of(name, e, count, rows, width), lambda e: weights.release(name))

    return _projections(source, hidden, inner, gated=False)


def _fused(weights: Weights, alone: str, count: int, hidden: int, inner: int) -> dict[str, Source]:
    both = weights.stored(f"{alone}.gate_up_proj", count, 2 * inner, hidden)
    down = weights.stored(f"{alone}.down_proj", count, hidden, inner)
    return _halves(weights, alone, both, down, slice(inner), slice(inner, None))


def _halves(weights: Weights, alone: str, both: Stored, down: Stored, gate: slice, up: slice) -> dict[str, Source]:
    """Sources in a stack of gate and up, which are some of its rows, and one of down."""

    def source(stack: Stored, kind: str) -> Source:
        return Source(lambda e: stack[e], lambda e: weights.release(f"{alone}.{kind}"))

    halves = {"gate": source(_rows(both, gate), "gate_up_proj"), "up": source(_rows(both, up), "gate_up_proj")}
    return {**halves, "down": source(down, "down_proj")}


def _rows(stack: Stored, rows: slice) -> Stored:
    return stack.part(rows) if isinstance(stack, QTensor) else stack[:, rows]


def _alternating(weights: Weights, alone: str, count: int, hidden: int, inner: int) -> dict[str, Source]:
    def stored(kind: str, rows: int, width: int) -> Stored:
        # the shape does not always tell: gpt-oss has as many inner channels as hidden ones
        name = f"{alone}.{kind}"
        if weights.coded(name):
            return weights.stored(name, count, rows, width)
        return dense(weights.stored(name, count, width, rows)).transpose(1, 2)

    both, down = stored("gate_up_proj", 2 * inner, hidden), stored("down_proj", hidden, inner)
    return _halves(weights, alone, both, down, EVEN, ODD)


def _biases(weights: Weights, name: str, home: str, count: int, hidden: int, inner: int) -> dict[str, Tensor]:
    if weights.has(f"{home}.gate_proj.bias"):
        shapes = {"gate": inner, "up": inner, "down": hidden}
        return {f"{kind}_bias": weights.vector(f"{home}.{kind}_proj.bias", count, n) for kind, n in shapes.items()}
    both = dense(weights.stored(f"{name}.experts.gate_up_proj_bias", count, 2 * inner))
    down = dense(weights.stored(f"{name}.experts.down_proj_bias", count, hidden))
    found = {"gate": both[:, EVEN], "up": both[:, ODD], "down": down}
    return {
        f"{kind}_bias": weights.keep(f"{home}.{kind}_proj.bias", value.contiguous().to(weights.device, torch.float32))
        for kind, value in found.items()
    }
