"""The linear layers of models: each op of `auraflux.ops`, with the adapters of the step.

`active` holds the adapters of the step that runs; without any, these functions are the ops. An adapter finds its layer by the
identity of the weight, so models need to know nothing of adapters.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from torch import Tensor

from auraflux import ops
from auraflux.adapters.experts import ExpertPairs, adapted_experts
from auraflux.adapters.pairs import Pair
from auraflux.errors import SettingsError
from auraflux.ops import Adapters, LinearInput, SharedExpert, combine, route
from auraflux.ops.moe.reference import shared_result
from auraflux.weights.experts.resident import LayerExperts, MixtureInput, ResidentExperts
from auraflux.weights.formats.stored import Stored

Biases = Sequence[Tensor | None] | None


@dataclass(frozen=True, eq=False)
class AdaptedLayers:
    """The layers that adapters change.

    linears  by the id of the weight
    experts  by the id of a layer's experts
    names    of the modules, by the same ids
    touched  ids that a step has used
    """

    linears: Mapping[int, Pair]
    experts: Mapping[int, ExpertPairs]
    names: Mapping[int, str]
    touched: set[int] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class AdapterStep:
    """The adapters of one step.

    slots  the adapter of each row, int32, by the number of rows: of all tokens, and of those that need logits
    """

    layers: AdaptedLayers
    slots: Mapping[int, Tensor]

    def changes(self, *weights: Stored | None) -> bool:
        """Return whether an adapter changes one of these weights."""
        return any(id(weight) in self.layers.linears for weight in weights)

    def add(self, ys: Sequence[Tensor], weights: Sequence[Stored], inputs: LinearInput) -> None:
        """Add the adapters' products with an input to those of its weights."""
        if self.changes(*weights):
            rows = _in_rows(inputs)
            ops.add_lora(rows, [y.view(-1, y.shape[-1]) for y in ys], self._adapters(weights, rows), True)

    def linears(
        self, inputs: LinearInput, weights: Sequence[Stored], biases: Biases = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the op `lora_linears` on an input of any leading dimensions."""
        rows, shape = _in_rows(inputs), inputs.x.shape
        total, found = ops.lora_linears(rows, weights, self._adapters(weights, rows), biases)
        return total.view(shape), tuple(y.view(*shape[:-1], y.shape[-1]) for y in found)

    def gate_up(self, inputs: LinearInput, gate: Stored, up: Stored) -> tuple[Tensor, Tensor]:
        """Run the op `lora_gate_up` on an input of any leading dimensions."""
        rows, shape = _in_rows(inputs), inputs.x.shape
        total, found = ops.lora_gate_up(rows, gate, up, self._adapters((gate, up), rows))
        return total.view(shape), found.view(*shape[:-1], found.shape[-1])

    def _adapters(self, weights: Sequence[Stored], inputs: LinearInput) -> Adapters:
        """Return the adapters of an input's weights, and remember that they were used."""
        pairs = [self.layers.linears.get(id(weight)) for weight in weights]
        self.layers.touched.update(id(weight) for weight, pair in zip(weights, pairs, strict=True) if pair is not None)
        a, b = [pair and pair.a for pair in pairs], [pair and pair.b for pair in pairs]
        return Adapters(self.rows(len(inputs.x)), a, b)

    def rows(self, count: int) -> Tensor:
        """Return the adapter of each of so many rows."""
        if count not in self.slots:
            raise SettingsError(
                f"an adapter changes a layer that computes {count} rows for {max(self.slots)} tokens, which is not supported. "
                "Merge it into the model: auraflux convert --merge."
            )
        return self.slots[count]


active: ContextVar[AdapterStep | None] = ContextVar("adapters", default=None)


@contextmanager
def adapters(step: AdapterStep | None) -> Iterator[None]:
    """Run a step inside the block with these adapters."""
    token = active.set(step)
    try:
        yield
    finally:
        active.reset(token)


def _in_rows(inputs: LinearInput) -> LinearInput:
    x, delta = inputs.x, inputs.delta
    return replace(inputs, x=x.view(-1, x.shape[-1]), delta=None if delta is None else delta.view(-1, x.shape[-1]))


def _step(*weights: Stored) -> AdapterStep | None:
    """Return the adapters of the step if they change one of these weights."""
    step = active.get()
    return step if step is not None and step.changes(*weights) else None


def linear(x: Tensor, weight: Stored, bias: Tensor | None = None) -> Tensor:
    """Run the op `linear`, with the adapters of the step."""
    step = _step(weight)
    return ops.linear(x, weight, bias) if step is None else step.linears(LinearInput(x), [weight], [bias])[1][0]


def linears(x: Tensor, weights: Sequence[Stored], biases: Biases = None) -> tuple[Tensor, ...]:
    """Run the op `linears`, with the adapters of the step."""
    step = _step(*weights)
    return ops.linears(x, weights, biases) if step is None else step.linears(LinearInput(x), weights, biases)[1]


def add_norm_linears(
    x: Tensor, delta: Tensor | None, norm: Tensor, eps: float, weights: Sequence[Stored], biases: Biases = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run the op `add_norm_linears`, with the adapters of the step."""
    step = _step(*weights)
    if step is None:
        return ops.add_norm_linears(x, delta, norm, eps, weights, biases)
    return step.linears(LinearInput(x, delta, norm, eps), weights, biases)


def add_norm_scores(
    x: Tensor, delta: Tensor | None, norm: Tensor, eps: float, weights: Sequence[Stored], biases: Biases = None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Run the op `add_norm_scores`, then the adapters of the step."""
    h, total, found = ops.add_norm_scores(x, delta, norm, eps, weights, biases)
    step = active.get()
    if step is not None:
        step.add(found, weights, LinearInput(x, delta, norm, eps))
    return h, total, found


def add_norm_gate_up(
    x: Tensor, delta: Tensor | None, norm: Tensor, eps: float, gate: Stored, up: Stored
) -> tuple[Tensor, Tensor]:
    """Run the op `add_norm_gate_up`, with the adapters of the step."""
    step = _step(gate, up)
    if step is None:
        return ops.add_norm_gate_up(x, delta, norm, eps, gate, up)
    return step.gate_up(LinearInput(x, delta, norm, eps), gate, up)


def run_mixture(experts: LayerExperts, inputs: MixtureInput) -> Tensor:
    """Route tokens, run their experts and add the result to the residual stream, [T, H], with the adapters of the step."""
    step = active.get()
    if step is None:
        return experts.forward(inputs)
    shared = inputs.shared
    if id(experts) not in step.layers.experts:
        if isinstance(shared, SharedExpert) and step.changes(*shared.first, shared.down):
            inputs = replace(inputs, shared=shared_output(inputs.x, shared))
        return experts.forward(inputs)
    ids, weights = route(inputs.scores, inputs.routing, inputs.bias)
    found = run_experts(experts, inputs.x, ids, weights)
    return combine(inputs.residual, found, shared_output(inputs.x, shared), inputs.gate)


def shared_output(x: Tensor, shared: SharedExpert | Tensor | None) -> Tensor | None:
    """Return the shared expert's output with the adapters of the step; None without one."""
    step = active.get()
    if not isinstance(shared, SharedExpert) or step is None or not step.changes(*shared.first, shared.down):
        return shared_result(x, shared)
    if shared.gate is None:
        return linear(ops.relu_square(linear(x, shared.up)), shared.down)
    if not step.changes(shared.gate, shared.up):
        return linear(ops.gate_up_swiglu(x, shared.gate, shared.up), shared.down)
    return linear(step.gate_up(LinearInput(x), shared.gate, shared.up)[1], shared.down)


def run_experts(experts: LayerExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of every token's experts, [T, H], with the adapters of the step."""
    step = active.get()
    pairs = None if step is None else step.layers.experts.get(id(experts))
    if step is None or pairs is None:
        return experts(x, ids, weights)
    assert isinstance(experts, ResidentExperts)
    step.layers.touched.add(id(experts))
    slots = step.rows(len(x))
    adapted = (slots >= 0).nonzero().view(-1)
    if not len(adapted):
        return experts(x, ids, weights)
    if len(adapted) == len(x):
        return adapted_experts(x, ids, weights, experts.experts, pairs, slots)
    # rows without an adapter take the ops that they take without adapters in the batch
    plain, found = (slots < 0).nonzero().view(-1), x.new_empty(x.shape)
    found[plain] = experts(x[plain], ids[plain], weights[plain])
    found[adapted] = adapted_experts(x[adapted], ids[adapted], weights[adapted], experts.experts, pairs, slots[adapted])
    return found
