"""Bytes of an outlined model (`outlined_model`) on a GPU: experts, and all other weights."""

from typing import Any

from torch import Tensor

from auraflux.loading.gpu_sizes import ExpertSizes, GpuSizes
from auraflux.ops import Experts
from auraflux.ops.moe.experts import BIASES, KINDS, blob_nbytes
from auraflux.ops.moe.pool import aligned
from auraflux.quant import QTensor


def outline_sizes(model: Any, k: int) -> GpuSizes:
    """Add up the tensors of a model on the meta device, whose tokens use k experts per layer."""
    weights, layers = _tensors(model)
    nbytes = sum(each.nbytes for each in weights.values())
    if not layers:
        return GpuSizes(nbytes, model.config.hidden)
    found = list(layers.values())
    each = [_expert_nbytes(experts) for experts in found]
    count, inner = found[0].count, found[0].inner
    experts = ExpertSizes(len(found), count, k, inner, max(each), sum(each) * count)
    return GpuSizes(nbytes, model.config.hidden, experts)


def _expert_nbytes(experts: Experts) -> int:
    like = {name: stack for name in (*KINDS, *BIASES) if (stack := getattr(experts, name)) is not None}
    return aligned(blob_nbytes({name: stack[0] for name, stack in like.items()}))


def _tensors(model: Any) -> tuple[dict[int, Tensor | QTensor], dict[int, Experts]]:
    """Return a model's tensors outside of mixtures, and the experts of each mixture, by identity."""
    weights: dict[int, Tensor | QTensor] = {}
    layers: dict[int, Experts] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Experts):
            layers[id(value)] = value
        elif isinstance(value, Tensor | QTensor):
            weights[id(value)] = value
        elif isinstance(value, dict):
            for each in value.values():
                visit(each)
        elif isinstance(value, list | tuple):
            for each in value:
                visit(each)
        elif type(value).__module__.startswith("auraflux."):
            visit(vars(value))

    visit(model)
    return weights, layers
