"""`Checkpoint`: interface of all checkpoint readers; `Stored` is one weight, dense or quantized."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from auraflux.quant import QTensor
from auraflux.weights.experts.packed_files import ExpertFiles
from auraflux.weights.experts.row_table import TablePart

Stored = Tensor | QTensor


def dense(found: Stored) -> Tensor:
    """Return a weight as a dense tensor, dequantized if needed."""
    return found.dequantize(torch.float32) if isinstance(found, QTensor) else found


def is_placeholder(found: Stored) -> TypeGuard[Tensor]:
    """Return whether a tensor is a placeholder without memory for one that could not be loaded."""
    return isinstance(found, Tensor) and not any(found.stride())


class Checkpoint(Protocol):
    """Weights on disk. Files are mapped; nothing is read before `load`.

    form     "hf": Hugging Face's names and conventions; "mlx": mlx-lm's; "gguf": a GGUF file mapped to Hugging Face's
    config   contents of config.json, or their equivalent from GGUF metadata
    experts  packed experts, which are not among the tensors; None if there are none
    """

    path: Path
    form: str
    config: dict[str, Any]
    experts: ExpertFiles | None

    @property
    def notes(self) -> list[str]:
        """Notes for the user on how the weights are represented, one sentence each."""

    def sizes(self) -> dict[str, int]:
        """Return the bytes on disk of each weight; codes, scales and biases count as one."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the dequantized weight."""

    def files(self) -> list[Path]:
        """Return all files of the weights and their config."""

    def load(self, name: str) -> Stored:
        """Return a weight, mapped without a copy where possible. Quantized weights have their rows in order."""

    def load_interleaved(self, name: str, lanes: int, expands_scales: bool) -> QTensor | None:
        """Return a quantized matrix with `lanes` rows interleaved, straight from the file; None if it needs further steps.

        expands_scales  of super-blocks
        """

    def load_one(self, name: str, index: int) -> Stored:
        """Return one matrix of a stack without reading the others."""

    def release(self, name: str) -> None:
        """Drop the mapped pages of a weight that was copied."""

    def table_part(self, name: str) -> TablePart:
        """Return the file extents of a matrix whose rows are read one by one; raise if the format does not allow it."""

    def unmap(self, names: Sequence[str]) -> None:
        """Unmap files that hold only these tensors."""
