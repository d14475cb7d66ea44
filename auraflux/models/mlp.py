"""The gated MLP of most families, and MLPs without a gate."""

import torch
from torch import Tensor

from auraflux.adapters.linears import add_norm_gate_up, add_norm_linears, linear, linears
from auraflux.models.layer import FeedForward, LayerInput, Residual
from auraflux.ops import Clamp, Limit, SharedExpert, clamped_swiglu, combine, limited_swiglu, relu_square
from auraflux.weights.loader import Weights


class MLP(FeedForward):
    """down(silu(gate x) * up x)."""

    def __init__(self, weights: Weights, name: str, hidden: int, inner: int):
        mine, self.join = weights.shard_columns(f"{name}.down_proj", hidden, inner), weights.slices.all_reduce
        self.gate = weights.row_shard(f"{name}.gate_proj", inner, hidden, mine)
        self.up = weights.row_shard(f"{name}.up_proj", inner, hidden, mine)
        self.down = weights.column_shard(f"{name}.down_proj", hidden, inner, mine)

    def as_expert(self) -> SharedExpert:
        """Return the weights as a shared expert; with tensor parallelism, the mixture sums it over ranks."""
        return SharedExpert(self.gate, self.up, self.down)

    def __call__(self, inputs: LayerInput) -> Residual:
        """Return the residual stream with its delta added, and the next delta, both [T, H]."""
        total, inner = add_norm_gate_up(*inputs, self.gate, self.up)
        return total, self.join(linear(inner, self.down))


class AddedMLP(MLP):
    """An MLP among mixtures: like them, it adds its output to the residual stream itself."""

    def __call__(self, inputs: LayerInput) -> Residual:
        """Return the residual stream with the output added, [T, H], and no delta."""
        return combine(*super().__call__(inputs)), None


class ActivatedMLP(MLP):
    """down(activation(gate x, up x)); among mixtures it adds its output to the residual stream itself."""

    def __init__(self, weights: Weights, name: str, hidden: int, inner: int, activation: Clamp | Limit):
        super().__init__(weights, name, hidden, inner)
        self.activation = activation

    def __call__(self, inputs: LayerInput) -> Residual:
        """Return the residual stream with the output added, [T, H], and no delta."""
        total, products = add_norm_linears(*inputs, [self.gate, self.up])
        return combine(total, self._down(*products)), None

    def output(self, x: Tensor) -> Tensor:
        """Return the output of normalised inputs: [T, H] -> [T, H]."""
        return self._down(*linears(x, [self.gate, self.up]))

    def _down(self, gate: Tensor, up: Tensor) -> Tensor:
        match self.activation:
            case Clamp(alpha, limit):
                inner = clamped_swiglu(gate, up, alpha, limit)
            case Limit(limit, gate_limit):
                inner = limited_swiglu(gate, up, limit, gate_limit)
        return self.join(linear(inner, self.down))


class FusedMLP(MLP):
    """An MLP whose gate and up projections are one tensor, gate rows first; it is whole on every rank."""

    def __init__(self, weights: Weights, name: str, hidden: int, inner: int):
        self.join = weights.slices.all_reduce
        halves = torch.arange(2 * inner).split(inner)
        self.gate, self.up = (weights.matrix(f"{name}.input_linear", inner, hidden, take=half) for half in halves)
        self.down = weights.matrix(f"{name}.output_linear", hidden, inner)


class SquareMLP(FeedForward):
    """down(relu(up x) ** 2)."""

    def __init__(self, weights: Weights, name: str, hidden: int, inner: int):
        mine, self.join = weights.shard_columns(f"{name}.down_proj", hidden, inner), weights.slices.all_reduce
        self.up = weights.row_shard(f"{name}.up_proj", inner, hidden, mine)
        self.down = weights.column_shard(f"{name}.down_proj", hidden, inner, mine)

    def as_expert(self) -> SharedExpert:
        """Return the weights as a shared expert, see `MLP`."""
        return SharedExpert(None, self.up, self.down)

    def __call__(self, inputs: LayerInput) -> Residual:
        """Return the residual stream with its delta added, and the next delta, both [T, H]."""
        total, (inner,) = add_norm_linears(*inputs, [self.up])
        return total, self.join(linear(relu_square(inner), self.down))


class NoMLP(FeedForward):
    """A layer without an MLP: the mixer's delta stays pending."""

    def __call__(self, inputs: LayerInput) -> Residual:
        return inputs.x, inputs.delta
