"""The experts of a mixture layer, however a checkpoint lays them out.

one each     experts.7.gate_proj.weight [I, H]                Hugging Face until 4.x, DeepSeek
fused        experts.gate_up_proj [E, 2I, H]                  Hugging Face 5.x
alternating  experts.gate_up_proj [E, H, 2I], gate and up in turn; as MXFP4 [E, 2I, H]      gpt-oss
stacks       switch_mlp.gate_proj.weight [E, I, H]            mlx-lm; `experts.gate_proj` for its gpt-oss
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from auraflux.ops.moe.experts import Clamp, Experts, Stack
from auraflux.quant import QTensor
from auraflux.weights.checkpoint import Stored
from auraflux.weights.loader import Weights, dense, is_blank

EVEN, ODD = slice(0, None, 2), slice(1, None, 2)


@dataclass(frozen=True)
class Source:
    """Where one projection of all experts is.

    matrix   gives an expert's
    release  says that it was copied
    """

    matrix: Callable[[int], Stored]
    release: Callable[[int], None] = lambda expert: None


def load_experts(
    weights: Weights, name: str, count: int, hidden: int, inner: int, *, stacks: str = "switch_mlp", clamp: Clamp | None = None
) -> Experts:
    """Take the experts under `name` from a checkpoint of any layout.

    stacks  what mlx-lm calls them
    clamp   of gpt-oss; a checkpoint with it has biases too
    """
    home, alone = f"{name}.{stacks}", f"{name}.experts"
    if weights.has(f"{home}.gate_proj.weight"):
        sources = _stacks(weights, home, count, hidden, inner)
    elif not weights.has(f"{alone}.gate_up_proj"):
        sources = _one_each(weights, alone, hidden, inner)
    elif clamp is None:
        sources = _fused(weights, alone, count, hidden, inner)
    else:
        sources = _alternating(weights, alone, count, hidden, inner)
    made = {kind: _stack(weights, f"{home}.{kind}_proj.weight", count, source) for kind, source in sources.items()}
    weights.release(f"{alone}.gate_up_proj", f"{alone}.down_proj")
    biases = _biases(weights, name, home, count, hidden, inner) if clamp else {}
    return Experts(made["gate"], made["up"], made["down"], **biases, clamp=clamp)


def _stacks(weights: Weights, home: str, count: int, hidden: int, inner: int) -> dict[str, Source]:
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {kind: _whole(weights.stored(f"{home}.{kind}_proj.weight", count, *shape)) for kind, shape in shapes.items()}


def _whole(stack: Stored) -> Source:
    return Source(lambda expert: stack[expert])


def _one_each(weights: Weights, alone: str, hidden: int, inner: int) -> dict[str, Source]:
    def source(kind: str, rows: int, width: int) -> Source:
        def name(expert: int) -> str:
            return f"{alone}.{expert}.{kind}_proj.weight"

        return Source(lambda e: weights.stored(name(e), rows, width), lambda e: weights.release(name(e)))

    return {"gate": source("gate", inner, hidden), "up": source("up", inner, hidden), "down": source("down", hidden, inner)}


def _fused(weights: Weights, alone: str, count: int, hidden: int, inner: int) -> dict[str, Source]:
    both = weights.stored(f"{alone}.gate_up_proj", count, 2 * inner, hidden)
    down = weights.stored(f"{alone}.down_proj", count, hidden, inner)
    return {"gate": _whole(_rows(both, slice(inner))), "up": _whole(_rows(both, slice(inner, None))), "down": _whole(down)}


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
    return {"gate": _whole(_rows(both, EVEN)), "up": _whole(_rows(both, ODD)), "down": _whole(down)}


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


def _stack(weights: Weights, name: str, count: int, source: Source) -> Stack:
    """All experts' matrices of one projection, made ready one after the other."""

    def ready(expert: int) -> Stored:
        found = source.matrix(expert)
        if isinstance(found, Tensor) and not is_blank(found):
            found = found.contiguous()
        return weights.ready(weights.rounded(found, name))

    first = ready(0)
    if is_blank(first):
        for expert in range(1, count):
            source.matrix(expert)
        return first.expand(count, *first.shape)
    if isinstance(first, QTensor):
        arrays: dict[str, Any] = {
            part: torch.empty(count, *array.shape, dtype=array.dtype, device=array.device)
            for part in ("packed", "scales", "biases")
            if (array := getattr(first, part)) is not None
        }
        for expert in range(count):
            made = first if expert == 0 else ready(expert)
            for part, array in arrays.items():
                array[expert] = getattr(made, part)
            source.release(expert)
        return weights.keep(name, replace(first, **arrays, shape=(count, *first.shape)))
    whole = torch.empty(count, *first.shape, dtype=first.dtype, device=first.device)
    for expert in range(count):
        whole[expert] = dense(first if expert == 0 else ready(expert))
        source.release(expert)
    return weights.keep(name, whole)
