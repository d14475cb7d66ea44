"""The experts of a mixture layer, however a checkpoint lays them out.

one each     experts.7.gate_proj.weight [I, H]                Hugging Face until 4.x, DeepSeek
fused        experts.gate_up_proj [E, 2I, H]                  Hugging Face 5.x
alternating  experts.gate_up_proj [E, H, 2I], gate and up in turn; as MXFP4 [E, 2I, H]      gpt-oss
stacks       switch_mlp.gate_proj.weight [E, I, H]            mlx-lm; `experts` for its gpt-oss, `switch_glu` for Gemma 4

Experts without a gate have up and down alone; those of one tensor are experts.up_proj [E, I, H].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from auraflux.ops.moe.experts import Activation, Clamp, Experts, Gelu, ReluSquare
from auraflux.quant import QTensor
from auraflux.weights.balanced import Balanced
from auraflux.weights.divided import Divided, Joined, by_expert
from auraflux.weights.loader import Weights
from auraflux.weights.slices import Slices
from auraflux.weights.stacks import Source
from auraflux.weights.stored import Stored, dense
from auraflux.weights.streamed import LayerExperts, Resident, Streamed

EVEN, ODD = slice(0, None, 2), slice(1, None, 2)


def load_experts(
    weights: Weights, name: str, count: int, hidden: int, inner: int, activation: Activation | None = None
) -> LayerExperts:
    """Take the experts under `name` from a checkpoint of any layout, or from where it was packed.

    activation  a checkpoint with gpt-oss's has biases too
    """
    home = f"{name}.{stacks_of(activation)}"
    division, slices = weights.division, weights.slices
    if weights.experts is not None:
        biases = _biases(weights, name, home, count, hidden, inner) if isinstance(activation, Clamp) else {}
        kept = weights.experts.layer(name, count, hidden, inner, biases, activation)
        if not slices.whole:
            # a file has experts one after the other, whole
            return Joined(Divided(kept, by_expert(slices), name, count, weights.device), slices.join)
        if division is None:
            return kept
        if division.balance is not None and isinstance(kept, Streamed):
            return Balanced(kept, division.balance)
        return Divided(kept, division, name, count, weights.device)
    layer = _Loading(weights, name, count, hidden, inner, activation)
    columns: range | None = None
    if not slices.whole:
        columns = layer.columns()
        division = by_expert(slices) if columns is None else division
    if division is None:
        resident = Resident(layer.some(range(count), columns))
        return resident if slices.whole else Joined(resident, slices.join)
    made = layer.some(division.placement.share(name, count), columns)
    # other ranks have the others
    weights.skip_under(f"{name}.experts.")

    def move(experts: Sequence[int], places: Sequence[int]) -> Sequence[int]:
        _put(layer.some(experts, columns), made, places)
        return places

    found = Divided(Resident(made), division, name, count, weights.device, move)
    return found if slices.whole else Joined(found, slices.join)


@dataclass(frozen=True)
class _Loading:
    """The experts under a name in a checkpoint, whatever its layout."""

    weights: Weights
    name: str
    count: int
    hidden: int
    inner: int
    activation: Activation | None

    @property
    def home(self) -> str:
        return f"{self.name}.{stacks_of(self.activation)}"

    def sources(self) -> dict[str, Source]:
        """Where each projection is."""
        weights, home, alone = self.weights, self.home, f"{self.name}.experts"
        sizes = self.count, self.hidden, self.inner
        gated = not isinstance(self.activation, ReluSquare)
        if weights.has(f"{home}.{'gate' if gated else 'up'}_proj.weight"):
            return _stacks(weights, home, *sizes, gated)
        if not gated and weights.has(f"{alone}.up_proj"):
            return _fused_ungated(weights, alone, *sizes)
        if not weights.has(f"{alone}.gate_up_proj"):
            return _one_each(weights, alone, self.hidden, self.inner, gated)
        return (_alternating if isinstance(self.activation, Clamp) else _fused)(weights, alone, *sizes)

    def columns(self) -> range | None:
        """Which columns of every expert this rank has; None where they do not divide evenly."""
        slices = self.weights.slices
        group = slices.group(self.sources()["down"].matrix(0), self.weights.rounds_in)
        return slices.columns(self.inner, group, f"{self.home}.down_proj") if slices.even(self.inner, group) else None

    def some(self, share: Sequence[int], columns: range | None) -> Experts:
        """Some experts, or some columns of them, made ready."""
        weights, alone, home = self.weights, f"{self.name}.experts", self.home
        sources = self.sources()
        if columns is not None:
            sources = {
                kind: source.cut(None, columns) if kind == "down" else source.cut(columns, None)
                for kind, source in sources.items()
            }
        made = {
            kind: weights.stack(f"{home}.{kind}_proj.weight", len(share), source.some(share))
            for kind, source in sources.items()
        }
        weights.release(f"{alone}.gate_up_proj", f"{alone}.up_proj", f"{alone}.down_proj")
        biases = {}
        if isinstance(self.activation, Clamp):
            biases = _biases(weights, self.name, home, self.count, self.hidden, self.inner)
        biases = {kind: value[list(share)].contiguous() for kind, value in biases.items()}
        if columns is not None:
            biases = {kind: _some_bias(kind, value, columns, weights.slices) for kind, value in biases.items()}
        return Experts(made.get("gate"), made["up"], made["down"], **biases, activation=self.activation)


def _put(some: Experts, there: Experts, places: Sequence[int]) -> None:
    """Write experts over others, where kernels that were recorded look for them."""
    for mine, theirs in zip(_arrays(some), _arrays(there), strict=True):
        theirs[list(places)] = mine


def _arrays(experts: Experts) -> list[Tensor]:
    stacks = [(s.packed, s.scales, s.biases) if isinstance(s, QTensor) else (s,) for s in experts.stacks]
    biases = (experts.gate_bias, experts.up_bias, experts.down_bias)
    return [array for arrays in (*stacks, biases) for array in arrays if array is not None]


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
