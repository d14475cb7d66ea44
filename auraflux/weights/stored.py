"""`Checkpoint`: weights as they lie on disk, by name; `Stored` is one of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from auraflux.quant import QTensor
from auraflux.weights.expert_files import ExpertFiles
from auraflux.weights.row_table import TablePart

Stored = Tensor | QTensor


def dense(found: Stored) -> Tensor:
    """A weight as numbers, whatever it is stored as."""
    return found.dequantize(torch.float32) if isinstance(found, QTensor) else found


def is_blank(found: Stored) -> TypeGuard[Tensor]:
    """Whether a tensor stands in for one that could not be had."""
    return isinstance(found, Tensor) and not any(found.stride())


class Checkpoint(Protocol):
    """Weights on disk. Files are mapped; nothing is read before `load`.

    form     "hf": Hugging Face's names and conventions; "mlx": mlx-lm's; "gguf": those of Hugging Face, made from a GGUF file
    config   config.json, or what a GGUF file says in its words
    experts  packed ones, which are not among the tensors; None where there are none
    """

    path: Path
    form: str
    config: dict[str, Any]
    experts: ExpertFiles | None

    @property
    def notes(self) -> list[str]:
        """What a user should know about how the weights were taken, one sentence each."""

    def sizes(self) -> dict[str, int]:
        """Bytes of each tensor on disk, by name; codes, scales and biases of one weight are one."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the matrix that a tensor stands for."""

    def files(self) -> list[Path]:
        """All that the weights and their description are read from."""

    def load(self, name: str) -> Stored:
        """The tensor, mapped where its bytes can be used as they are. Quantized weights come with their rows in order."""

    def load_one(self, name: str, index: int) -> Stored:
        """One matrix of a stack, as `load` gives them; the others are not touched."""

    def release(self, name: str) -> None:
        """Say that a loaded tensor was copied: its mapped pages need not stay in memory."""

    def table_part(self, name: str) -> TablePart:
        """Where the rows of a matrix lie, for those who read them one by one; refused where they cannot be."""

    def unmap(self, names: Sequence[str]) -> None:
        """Say that tensors will not be loaded: files that hold no others need not stay mapped."""
