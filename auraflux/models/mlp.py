"""The gated MLP that most families have, and one without a gate."""

from auraflux.models.decoder import FeedForward, Residual, Stream
from auraflux.ops import SharedExpert, add_norm_gate_up, add_norm_linears, combine, linear, relu_square
from auraflux.weights.loader import Weights


class MLP(FeedForward):
    """down(silu(gate x) * up x)."""

    def __init__(self, weights: Weights, name: str, hidden: int, inner: int):
        mine, self.join = weights.columns(f"{name}.down_proj", hidden, inner), weights.slices.join
        self.gate = weights.some_rows(f"{name}.gate_proj", inner, hidden, mine)
        self.up = weights.some_rows(f"{name}.up_proj", inner, hidden, mine)
        self.down = weights.some_columns(f"{name}.down_proj", hidden, inner, mine)

    def as_expert(self) -> SharedExpert:
        """The weights, for a mixture to add it to its experts; where ranks have some columns each, before these are joined."""
        return SharedExpert(self.gate, self.up, self.down)

    def __call__(self, stream: Stream) -> Residual:
        """Give the stream with all that was to be added to it, and what comes next, both [T, H]."""
        total, inner = add_norm_gate_up(*stream, self.gate, self.up)
        return total, self.join(linear(inner, self.down))


class AddedMLP(MLP):
    """An MLP among mixtures: as they do, it adds what it gives to the stream itself."""

    def __call__(self, stream: Stream) -> Residual:
        """Give the stream with all that is added to it, [T, H]."""
        return combine(*super().__call__(stream)), None


class SquareMLP(FeedForward):
    """down(relu(up x) ** 2)."""

    def __init__(self, weights: Weights, name: str, hidden: int, inner: int):
        mine, self.join = weights.columns(f"{name}.down_proj", hidden, inner), weights.slices.join
        self.up = weights.some_rows(f"{name}.up_proj", inner, hidden, mine)
        self.down = weights.some_columns(f"{name}.down_proj", hidden, inner, mine)

    def as_expert(self) -> SharedExpert:
        """The weights, for a mixture to add it to its experts, see `MLP`."""
        return SharedExpert(None, self.up, self.down)

    def __call__(self, stream: Stream) -> Residual:
        """Give the stream with all that was to be added to it, and what comes next, both [T, H]."""
        total, (inner,) = add_norm_linears(*stream, [self.up])
        return total, self.join(linear(relu_square(inner), self.down))


class NoMLP(FeedForward):
    """What a mixer gives goes on to the next layer as it is."""

    def __call__(self, stream: Stream) -> Residual:
        return stream.x, stream.delta
