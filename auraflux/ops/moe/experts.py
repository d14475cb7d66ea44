"""`Experts`: the weights of one mixture layer, as one stack per projection.

A stack need not be one piece of memory: only each expert's own arrays must be. `from_blobs` makes stacks over a bank of blobs
that hold one expert each, as read from disk; expert e is then blob e, and the same kernels serve both.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.kinds import check_fields
from auraflux.quant import QTensor

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
    """silu(gate) * up with both clamped first, see `limited_swiglu`."""

    limit: float

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Gelu:
    """The tanh form of gelu replaces silu, see `geglu`."""


@dataclass(frozen=True)
class ReluSquare:
    """relu(up) ** 2, see `relu_square`: there is no gate."""


Activation = Clamp | Limit | Gelu | ReluSquare
KINDS = ("gate", "up", "down")


@dataclass(frozen=True, eq=False)
class SharedExpert:
    """The weights of an MLP that every token goes to, down(silu(gate x) * up x), or without a gate down(relu(up x) ** 2).

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
        """What is multiplied by x."""
        return (self.up,) if self.gate is None else (self.gate, self.up)


@dataclass(frozen=True, eq=False)
class Experts:
    """E experts, each down(silu(gate x) * up x).

    gate, up  [E, I, H]; gate is None where the activation has none
    down      [E, H, I]
    gate_bias, up_bias [E, I], down_bias [E, H]  or None
    activation  what replaces silu(gate) * up, or None
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
                    f"'{name}' has shape {list(stack.shape)}; {list(shape)} is needed beside up {list(self.up.shape)}."
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
        """The weights that there are, down last."""
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)

    @cached_property
    def strides(self) -> dict[str, tuple[int, ...]]:
        """Bytes from one expert's codes, scales and biases to the next expert's, by projection; of quantized ones."""
        return {
            name: tuple(0 if a is None else a.stride(0) * a.element_size() for a in (stack.packed, stack.scales, stack.biases))
            for name in KINDS
            if isinstance(stack := getattr(self, name), QTensor)
        }

    @classmethod
    def from_blobs(cls, bank: Tensor, like: Mapping[str, QTensor]) -> "Experts":
        """Stacks over blobs of codes, scales and biases of gate, up and down.

        bank  uint8 [E, size], one expert a row
        like  one expert's matrices, for shapes and formats; their arrays lie in a blob one after the other in this order.
              Where there is no gate, the activation is `ReluSquare`
        """
        if bank.dtype != torch.uint8 or bank.dim() != 2 or bank.stride(1) != 1:
            raise FormatError(f"a bank of experts is uint8 [E, size]; this one is {bank.dtype} {list(bank.shape)}.")
        stacks: dict[str, Any] = {} if "gate" in like else {"gate": None, "activation": ReluSquare()}
        offset = 0
        for name in (kind for kind in KINDS if kind in like):
            arrays: dict[str, Any] = {}
            for part in ("packed", "scales", "biases"):
                array = getattr(like[name], part)
                nbytes = 0 if array is None else array.nbytes
                if offset + nbytes > bank.shape[1]:
                    raise FormatError(f"a blob of {bank.shape[1]} bytes ends before the arrays of '{name}' do.")
                arrays[part] = None if array is None else _over(bank, offset, array)
                offset += nbytes
            stacks[name] = replace(like[name], **arrays, shape=(bank.shape[0], *like[name].shape))
        return cls(**stacks)


def blob_of(experts: Mapping[str, QTensor]) -> Tensor:
    """One expert's arrays as a row of bytes, in the order `from_blobs` reads them."""
    there = [experts[name] for name in KINDS if name in experts]
    arrays = [a for matrix in there for a in (matrix.packed, matrix.scales, matrix.biases)]
    return torch.cat([a.contiguous().view(-1).view(torch.uint8) for a in arrays if a is not None])


def _over(bank: Tensor, offset: int, array: Tensor) -> Tensor:
    """A view of `array`'s dtype and shape into every row of the bank."""
    size = array.element_size()
    if (bank.storage_offset() + offset) % size or bank.stride(0) % size:
        raise FormatError(f"arrays of {size}-byte elements do not start at multiples of {size} in these blobs.")
    whole = torch.empty(0, dtype=array.dtype, device=bank.device).set_(bank.untyped_storage())
    strides = [math.prod(array.shape[i + 1 :]) for i in range(array.dim())]
    start = (bank.storage_offset() + offset) // size
    return whole.as_strided((bank.shape[0], *array.shape), (bank.stride(0) // size, *strides), start)
