"""`Experts`: the weights of one mixture layer, one stack per projection.

A stack need not be contiguous; only each expert's arrays must be. `from_blobs` builds stacks as views over uint8 blobs of one
expert each, as stored on disk, so the same kernels serve both layouts. Where a cache holds the experts (`pool.py`), the rows
of a stack are its slots, and `slots` says which expert is in which.
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
    """Settings of the clamped SwiGLU that replaces silu(gate) * up, see `clamped_swiglu`.

    bare  the experts have no biases, and files hold their gate and up rows apart; gpt-oss has biases and alternating rows
    """

    alpha: float
    limit: float
    bare: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Limit:
    """silu(gate) * up with both inputs clamped first, see `limited_swiglu`.

    gate  the limit of the gate; None for `limit`
    """

    limit: float
    gate: float | None = None

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
BIASES = ("gate_bias", "up_bias", "down_bias")


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
    slots     [experts]  int32, the row of each expert in the stacks and biases above; None if expert e is row e
    """

    gate: Stack | None
    up: Stack
    down: Stack
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: Activation | None = None
    slots: Tensor | None = None

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
        return self.rows if self.slots is None else len(self.slots)

    @property
    def rows(self) -> int:
        """Number of experts that the stacks hold."""
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
    def from_blobs(cls, blobs: Tensor, like: Mapping[str, Stack]) -> "Experts":
        """Return stacks as views over blobs of codes, scales and biases of gate, up and down.

        blobs  uint8 [E, size], one expert a row
        like   one expert's matrices, for shapes and formats; their arrays are consecutive in a blob, in this order, followed
               by the vectors `gate_bias`, `up_bias` and `down_bias`, if any. Without a gate the activation is `ReluSquare`
        """
        if blobs.dtype != torch.uint8 or blobs.dim() != 2 or blobs.stride(1) != 1:
            raise FormatError(f"expert blobs are uint8 [E, size]; these are {blobs.dtype} {list(blobs.shape)}.")
        stacks: dict[str, Any] = {} if "gate" in like else {"gate": None, "activation": ReluSquare()}
        offset = 0
        for name in (name for name in (*KINDS, *BIASES) if name in like):
            matrix, views = like[name], []
            for array in _arrays(matrix):
                offset = _align(offset, array)
                if offset + array.nbytes > blobs.shape[1]:
                    raise FormatError(f"a blob of {blobs.shape[1]} bytes ends before the arrays of '{name}' do.")
                views.append(_over(blobs, offset, array))
                offset += array.nbytes
            if isinstance(matrix, Tensor):
                stacks[name] = views[0]
                continue
            arrays: dict[str, Any] = dict(zip(("packed", "scales", "biases"), views, strict=False))
            stacks[name] = replace(matrix, **arrays, shape=(blobs.shape[0], *matrix.shape))
        return cls(**stacks)


def blob_nbytes(like: Mapping[str, Stack]) -> int:
    """Return the bytes of `blob_of`."""
    offset = 0
    for name in (name for name in (*KINDS, *BIASES) if name in like):
        for array in _arrays(like[name]):
            offset = _align(offset, array) + array.nbytes
    return offset


def blob_of(experts: Mapping[str, Stack], out: Tensor | None = None) -> Tensor:
    """Concatenate one expert's arrays to a row of bytes, in the order `from_blobs` expects.

    out  receives the bytes; its rest is not modified
    """
    blob = torch.zeros(blob_nbytes(experts), dtype=torch.uint8) if out is None else out
    offset = 0
    for name in (name for name in (*KINDS, *BIASES) if name in experts):
        for array in _arrays(experts[name]):
            offset = _align(offset, array)
            blob[offset : offset + array.nbytes] = array.contiguous().view(-1).view(torch.uint8)
            offset += array.nbytes
    return blob


def _arrays(matrix: Stack) -> list[Tensor]:
    """Return the arrays of a matrix in the order of blobs."""
    if isinstance(matrix, Tensor):
        return [matrix]
    return [array for array in (matrix.packed, matrix.scales, matrix.biases) if array is not None]


def _align(offset: int, array: Tensor) -> int:
    """Round an offset up to a multiple of the array's elements."""
    return -(-offset // array.element_size()) * array.element_size()


def _over(blobs: Tensor, offset: int, array: Tensor) -> Tensor:
    """Return a strided view with `array`'s dtype and shape into every blob."""
    size = array.element_size()
    if (blobs.storage_offset() + offset) % size or blobs.stride(0) % size:
        raise FormatError(f"arrays of {size}-byte elements do not start at multiples of {size} in these blobs.")
    elements = torch.empty(0, dtype=array.dtype, device=blobs.device).set_(blobs.untyped_storage())
    strides = [math.prod(array.shape[i + 1 :]) for i in range(array.dim())]
    start = (blobs.storage_offset() + offset) // size
    return elements.as_strided((blobs.shape[0], *array.shape), (blobs.stride(0) // size, *strides), start)
