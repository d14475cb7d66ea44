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
class Gelu:
    """The tanh form of gelu replaces silu, see `geglu`."""


Activation = Clamp | Gelu


@dataclass(frozen=True, eq=False)
class SharedExpert:
    """The weights of an MLP that every token goes to, down(silu(gate x) * up x).

    gate, up  [I, H]
    down      [H, I]
    """

    gate: Stack
    up: Stack
    down: Stack

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, eq=False)
class Experts:
    """E experts, each down(silu(gate x) * up x).

    gate, up  [E, I, H]
    down      [E, H, I]
    gate_bias, up_bias [E, I], down_bias [E, H]  or None
    activation  what replaces silu(gate) * up, or None
    """

    gate: Stack
    up: Stack
    down: Stack
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: Activation | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.gate.shape) != 3:
            raise FormatError(f"'gate' has shape {list(self.gate.shape)}; [experts, rows, width] is needed.")
        count, inner, hidden = self.gate.shape
        wanted: dict[str, tuple[int, ...]] = {"up": (count, inner, hidden), "down": (count, hidden, inner)}
        wanted |= {"gate_bias": (count, inner), "up_bias": (count, inner), "down_bias": (count, hidden)}
        for name, shape in wanted.items():
            stack = getattr(self, name)
            if stack is not None and tuple(stack.shape) != shape:
                raise FormatError(
                    f"'{name}' has shape {list(stack.shape)}; {list(shape)} is needed beside gate {list(self.gate.shape)}."
                )
            if stack is not None and stack.device != self.gate.device:
                raise FormatError(f"'{name}' is on {stack.device}, gate on {self.gate.device}.")

    @property
    def count(self) -> int:
        return self.gate.shape[0]

    @property
    def hidden(self) -> int:
        return self.gate.shape[2]

    @property
    def inner(self) -> int:
        return self.gate.shape[1]

    @property
    def device(self) -> torch.device:
        return self.gate.device

    @cached_property
    def strides(self) -> dict[str, tuple[int, ...]]:
        """Bytes from one expert's codes, scales and biases to the next expert's, by projection; of quantized ones."""
        return {
            name: tuple(0 if a is None else a.stride(0) * a.element_size() for a in (stack.packed, stack.scales, stack.biases))
            for name in ("gate", "up", "down")
            if isinstance(stack := getattr(self, name), QTensor)
        }

    @classmethod
    def from_blobs(cls, bank: Tensor, like: Mapping[str, QTensor]) -> "Experts":
        """Stacks over blobs of codes, scales and biases of gate, up and down.

        bank  uint8 [E, size], one expert a row
        like  one expert's matrices, for shapes and formats; their arrays lie in a blob one after the other in this order
        """
        if bank.dtype != torch.uint8 or bank.dim() != 2 or bank.stride(1) != 1:
            raise FormatError(f"a bank of experts is uint8 [E, size]; this one is {bank.dtype} {list(bank.shape)}.")
        stacks: dict[str, Any] = {}
        offset = 0
        for name in ("gate", "up", "down"):
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
    arrays = [a for name in ("gate", "up", "down") for a in (experts[name].packed, experts[name].scales, experts[name].biases)]
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
