"""`Experts`: the weights of one mixture layer, one stack per projection.

A stack need not be contiguous; only each expert's arrays must be. `from_blobs` builds stacks as views over uint8 blobs of one
expert each, as stored on disk, so the same kernels serve both layouts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant import QTensor
from auraflux.validation import check_fields

Stack = QTensor | Tensor


@dataclass(frozen=True)
class Clamp:
    """Settings of the clamped SwiGLU that replaces silu(gate) * up, see `clamped_swiglu`."""

    alpha: float
    limit: float

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Limit:
    """silu(gate) * up with both inputs clamped first, see `limited_swiglu`."""

    limit: float

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Gelu:
    """Tanh-approximated GELU in place of silu, see `geglu`."""


@dataclass(frozen=True)
class ReluSquare:
    """relu(up) ** 2 without a gate, see `relu_square`."""


Activation = Clamp | Limit | Gelu | ReluSquare
KINDS = ("gate", "up", "down")


@dataclass(frozen=True, eq=False)
class SharedExpert:
    """Weights of the MLP applied to every token: down(silu(gate x) * up x), or down(relu(up x) ** 2) without a gate.

    gate, up  [I, H]; gate may be None
    down      [H, I]
    """

    gate: Stack | None
    up: Stack
    down: Stack

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def inner(self) -> int:
        return self.up.shape[0]

    @property
    def first(self) -> tuple[Stack, ...]:
        """Projections applied to x."""
        return (self.up,) if self.gate is None else (self.gate, self.up)


@dataclass(frozen=True, eq=False)
class Experts:
    """E experts, each down(silu(gate x) * up x).

    gate, up  [E, I, H]; gate is None where the activation has none
    down      [E, H, I]
    gate_bias, up_bias [E, I], down_bias [E, H]  or None
    activation  replaces silu(gate) * up, or None
    """

    gate: Stack | None
    up: Stack
    down: Stack
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: Activation | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.up.shape) != 3:
            raise FormatError(f"'up' has shape {list(self.up.shape)}; [experts, rows, width] is needed.")
        if (self.gate is None) != isinstance(self.activation, ReluSquare):
            there = "no gate" if self.gate is None else "a gate"
            raise FormatError(f"experts with {there} cannot have the activation {self.activation}.")
        count, inner, hidden = self.up.shape
        wanted: dict[str, tuple[int, ...]] = {"gate": (count, inner, hidden), "down": (count, hidden, inner)}
        wanted |= {"gate_bias": (count, inner), "up_bias": (count, inner), "down_bias": (count, hidden)}
        for name, shape in wanted.items():
            stack = getattr(self, name)
            if stack is not None and tuple(stack.shape) != shape:
                raise FormatError(
                    f"'{name}' has shape {list(stack.shape)}; {list(shape)} is needed for up {list(self.up.shape)}."
                )
            if stack is not None and stack.device != self.up.device:
                raise FormatError(f"'{name}' is on {stack.device}, up on {self.up.device}.")

    @property
    def count(self) -> int:
        return self.up.shape[0]

    @property
    def hidden(self) -> int:
        return self.up.shape[2]

    @property
    def inner(self) -> int:
        return self.up.shape[1]

    @property
    def device(self) -> torch.device:
        return self.up.device

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """Projections that exist, down last."""
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)

    @cached_property
    def strides(self) -> dict[str, tuple[int, ...]]:
        """Byte strides between experts for codes, scales and biases, by quantized projection."""
        return {
            name: tuple(0 if a is None else a.stride(0) * a.element_size() for a in (stack.packed, stack.scales, stack.biases))
            for name in KINDS
            if isinstance(stack := getattr(self, name), QTensor)
        }

    @classmethod
    def from_blobs(cls, blobs: Tensor, like: Mapping[str, QTensor]) -> "Experts":
        """Return stacks as views over blobs of codes, scales and biases of gate, up and down.

        blobs  uint8 [E, size], one expert a row
        like   one expert's matrices, for shapes and formats; their arrays are consecutive in a blob, in this order.
               Without a gate the activation is `ReluSquare`
        """
        if blobs.dtype != torch.uint8 or blobs.dim() != 2 or blobs.stride(1) != 1:
            raise FormatError(f"expert blobs are uint8 [E, size]; these are {blobs.dtype} {list(blobs.shape)}.")
        stacks: dict[str, Any] = {} if "gate" in like else {"gate": None, "activation": ReluSquare()}
        offset = 0
        for name in (kind for kind in KINDS if kind in like):
            arrays: dict[str, Any] = {}
            for part in ("packed", "scales", "biases"):
                array = getattr(like[name], part)
                nbytes = 0 if array is None else array.nbytes
                if offset + nbytes > blobs.shape[1]:
                    raise FormatError(f"a blob of {blobs.shape[1]} bytes ends before the arrays of '{name}' do.")
                arrays[part] = None if array is None else _over(blobs, offset, array)
                offset += nbytes
            stacks[name] = replace(like[name], **arrays, shape=(blobs.shape[0], *like[name].shape))
        return cls(**stacks)


def blob_of(experts: Mapping[str, QTensor]) -> Tensor:
    """Concatenate one expert's arrays to a row of bytes, in the order `from_blobs` expects."""
    there = [experts[name] for name in KINDS if name in experts]
    arrays = [a for matrix in there for a in (matrix.packed, matrix.scales, matrix.biases)]
    return torch.cat([a.contiguous().view(-1).view(torch.uint8) for a in arrays if a is not None])


def _over(blobs: Tensor, offset: int, array: Tensor) -> Tensor:
    """Return a strided view with `array`'s dtype and shape into every blob."""
    size = array.element_size()
    if (blobs.storage_offset() + offset) % size or blobs.stride(0) % size:
        raise FormatError(f"arrays of {size}-byte elements do not start at multiples of {size} in these blobs.")
    elements = torch.empty(0, dtype=array.dtype, device=blobs.device).set_(blobs.untyped_storage())
    strides = [math.prod(array.shape[i + 1 :]) for i in range(array.dim())]
    start = (blobs.storage_offset() + offset) // size
    return elements.as_strided((blobs.shape[0], *array.shape), (blobs.stride(0) // size, *strides), start)
