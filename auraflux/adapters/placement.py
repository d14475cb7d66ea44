"""Place adapters in a model: find the weight that each of their modules changes."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from auraflux.adapters.experts import ExpertPairs
from auraflux.adapters.linears import AdaptedLayers
from auraflux.adapters.pairs import LowRank, stack
from auraflux.adapters.peft_folder import Adapter
from auraflux.errors import FormatError, SettingsError
from auraflux.ops import Clamp, Experts
from auraflux.weights.experts.resident import LayerExperts, ResidentExperts
from auraflux.weights.formats.stored import Stored
from auraflux.weights.formats.untrusted import listed, named, shown
from auraflux.weights.named_weights import NamedWeights

KINDS = ("gate", "up", "down")
ONE_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(gate|up|down)_proj$")
STACK = re.compile(r"(.+)\.experts(?:\.base_layer)?$")
# transformers' names of mixtures whose checkpoints have others
OTHER_NAMES = ((".mlp.", ".block_sparse_moe."), (".mlp.", ".feed_forward."))


class Change(NamedTuple):
    """One adapter's change of one projection of one expert."""

    experts: LayerExperts
    expert: int
    kind: str
    change: LowRank


def place(
    adapters: Sequence[Adapter],
    weights: NamedWeights,
    rename: Callable[[str], str | None],
    device: torch.device,
    dtype: torch.dtype,
) -> AdaptedLayers:
    """Return the layers that adapters change, with the matrices of all of them."""
    linears: dict[int, dict[int, LowRank]] = defaultdict(dict)
    experts: dict[int, dict[tuple[str, int], dict[int, LowRank]]] = defaultdict(lambda: defaultdict(dict))
    for number, adapter in enumerate(adapters):
        unknown = []
        for module in adapter.pairs:
            name = _our_name(module, weights, rename)
            if name in weights.linears:
                for weight, rows in weights.linears[name]:
                    linears[id(weight)][number] = _linear_change(adapter, module, weight, rows)
            elif changes := list(_expert_changes(adapter, module, name, weights)):
                for layer, expert, kind, change in changes:
                    experts[id(layer)][kind, expert][number] = change
            else:
                unknown.append(module)
        if unknown:
            raise FormatError(
                f"the adapter in {named(adapter.path)} changes {listed(unknown, 4)}, which this model does not compute "
                "as linear layers. Merge it into the model: auraflux convert --merge."
            )
    count, names = len(adapters), {id(each.weight): name for name, found in weights.linears.items() for each in found}

    def kinds(found: Mapping[tuple[str, int], dict[int, LowRank]]) -> ExpertPairs:
        of = {kind: {e: stack(each, count, device, dtype) for (k, e), each in found.items() if k == kind} for kind in KINDS}
        return ExpertPairs(**of)

    return AdaptedLayers(
        {weight: stack(found, count, device, dtype) for weight, found in linears.items()},
        {layer: kinds(found) for layer, found in experts.items()},
        names | {id(layer): f"{name}.experts" for name, layer in weights.experts.items()},
    )


def _our_name(module: str, weights: NamedWeights, rename: Callable[[str], str | None]) -> str:
    """Return our name of a module of transformers; of a stack of experts, the name of its mixture and `.experts`."""
    stacked = STACK.match(module)
    path = f"{stacked[1]}.experts" if stacked else module
    for name in (path, *(path.replace(*other) for other in OTHER_NAMES)):
        ours = (rename(f"{name}.gate_up_proj") or "").removesuffix(".gate_up_proj") if stacked else _module(rename, name)
        if ours in weights.linears or ours.removesuffix(".experts") in weights.experts:
            return ours
    return _module(rename, path)


def _module(rename: Callable[[str], str | None], name: str) -> str:
    return (rename(f"{name}.weight") or "").removesuffix(".weight")


def _linear_change(adapter: Adapter, module: str, weight: Stored, rows: Tensor | None) -> LowRank:
    a, b = adapter.pairs[module]
    shape = (len(b) if rows is None else len(rows), a.shape[1])
    if tuple(weight.shape) != shape or (rows is not None and int(rows.max()) >= len(b)):
        raise _misfit(adapter, module, weight.shape)
    b = b.float() * adapter.scales.of(module, len(a))
    return LowRank(a, b if rows is None else b[rows])


def _misfit(adapter: Adapter, module: str, shape: Sequence[int]) -> FormatError:
    a, b = adapter.pairs[module]
    return FormatError(
        f"the adapter in {named(adapter.path)} has {shown(list(b.shape))} times {shown(list(a.shape))} for {named(module)}, "
        f"whose weight is {shown(list(shape))}. It was trained for another model."
    )


def _expert_changes(adapter: Adapter, module: str, name: str, weights: NamedWeights) -> Iterator[Change]:
    """Yield the changes of experts by a module: a stack of all, or a projection of one; nothing where it is neither."""
    one = ONE_EXPERT.match(name)
    layer = weights.experts.get(one[1] if one else name.removesuffix(".experts"))
    if layer is None or not (one or name.endswith(".experts")):
        return
    if not isinstance(layer, ResidentExperts):
        raise SettingsError(
            f"the adapter {named(adapter.name)} changes experts, and not all experts fit in the device's memory. "
            "Merge it into the model: auraflux convert --merge."
        )
    experts = layer.experts
    if one is None:
        yield from _stack_changes(adapter, module, layer, experts)
        return
    a, b = adapter.pairs[module]
    number, kind = int(one[2]), one[3]
    stack_of = getattr(experts, kind)
    if stack_of is None or number >= experts.count or tuple(stack_of.shape[1:]) != (len(b), a.shape[1]):
        raise _misfit(adapter, module, () if stack_of is None else stack_of.shape)
    yield Change(layer, number, kind, LowRank(a, b.float() * adapter.scales.of(module, len(a))))


def _stack_changes(adapter: Adapter, module: str, layer: LayerExperts, experts: Experts) -> Iterator[Change]:
    """Yield the changes of all experts by a pair over a stack, which PEFT stores as [E * R, K] and [N, R * E]."""
    a, b = adapter.pairs[module]
    count, hidden, inner = experts.count, experts.hidden, experts.inner
    gates = experts.gate is not None
    parameters = {("gate_up_proj", (2 if gates else 1) * inner, hidden), ("down_proj", hidden, inner)}
    parameter = next((p for p, rows, width in parameters if (len(b), a.shape[1]) == (rows, width)), None)
    if parameter is None or len(a) % count:
        raise _misfit(adapter, module, experts.up.shape)
    rank, path = len(a) // count, STACK.sub(r"\1.experts", module)
    each_a = a.view(count, rank, -1)
    each_b = b.float().view(len(b), rank, count).permute(2, 0, 1) * adapter.scales.of(f"{path}.{parameter}", rank)
    for expert in range(count):
        whole, rows = each_a[expert], each_b[expert]
        if parameter == "down_proj":
            yield Change(layer, expert, "down", LowRank(whole, rows))
        elif not gates:
            yield Change(layer, expert, "up", LowRank(whole, rows))
        else:
            # gpt-oss alternates gate and up
            halves = (rows[0::2], rows[1::2]) if isinstance(experts.activation, Clamp) else rows.chunk(2)
            yield Change(layer, expert, "gate", LowRank(whole, halves[0]))
            yield Change(layer, expert, "up", LowRank(whole, halves[1]))
