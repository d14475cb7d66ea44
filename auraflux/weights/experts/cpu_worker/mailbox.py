"""`Mailbox`: host memory through which a GPU asks for the outputs of experts, one request at a time.

The device writes layer, count, tokens, experts and x, and then `request_seq`, one more than before (0 follows 2**31 - 1). The
worker writes the results, and then `done_seq`. The device may write the next request once it has read that.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

LINE_NBYTES = 128  # a GPU transfers this much; a field that one side polls has a line of its own
PAGE_NBYTES = 4096


class Field(NamedTuple):
    """A field of a mailbox: its offset in bytes, its dtype and its shape."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Mailbox:
    """A request and its answer in page-aligned memory of full pages.

    memory       uint8 [nbytes]; pin it for use by a GPU
    request_seq  int32 [1]            number of the last request
    done_seq     int32 [1]            number of the last request that was answered
    error        int32 [1]            code of the last wrong request, see `ERRORS`; 0 if there was none
    layer        int32 [1]
    count        int32 [1]            pairs of this request
    pairs        int32 [max_pairs]    token of each pair
    experts      int32 [max_pairs]    expert of each pair
    x            bf16 [max_tokens, H]
    result       float32 [max_pairs, H]
    """

    def __init__(self, hidden: int, max_pairs: int, max_tokens: int):
        self.fields = _layout(hidden, max_pairs, max_tokens)
        last = self.fields["result"]
        nbytes = -(-(last.offset + last.nbytes) // PAGE_NBYTES) * PAGE_NBYTES
        room = torch.zeros(nbytes + PAGE_NBYTES, dtype=torch.uint8)
        self.memory = room[-room.data_ptr() % PAGE_NBYTES :][:nbytes]
        self.request_seq, self.done_seq, self.error = (self.view(name) for name in ("request_seq", "done_seq", "error"))
        self.layer, self.count = self.view("layer"), self.view("count")
        self.pairs, self.experts = self.view("pairs"), self.view("experts")
        self.x, self.result = self.view("x"), self.view("result")

    def view(self, name: str) -> Tensor:
        """Return a field as a tensor."""
        field = self.fields[name]
        return self.memory[field.offset : field.offset + field.nbytes].view(field.dtype).view(field.shape)

    def numpy(self, name: str) -> np.ndarray:
        """Return a field as an array; x, which NumPy has no dtype for, as the bits of bf16."""
        tensor = self.view(name)
        return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()

    def address(self, name: str) -> int:
        return self.memory.data_ptr() + self.fields[name].offset

    @property
    def offsets(self) -> dict[str, int]:
        """Offsets of the fields in bytes."""
        return {name: field.offset for name, field in self.fields.items()}


def _layout(hidden: int, max_pairs: int, max_tokens: int) -> dict[str, Field]:
    """Place every field; layer and count share a line."""
    shapes: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
        ("request_seq", torch.int32, (1,)),
        ("done_seq", torch.int32, (1,)),
        ("error", torch.int32, (1,)),
        ("layer", torch.int32, (1,)),
        ("count", torch.int32, (1,)),
        ("pairs", torch.int32, (max_pairs,)),
        ("experts", torch.int32, (max_pairs,)),
        ("x", torch.bfloat16, (max_tokens, hidden)),
        ("result", torch.float32, (max_pairs, hidden)),
    ]
    found: dict[str, Field] = {}
    end = 0
    for name, dtype, shape in shapes:
        start = end if name == "count" else -(-end // LINE_NBYTES) * LINE_NBYTES
        found[name] = Field(start, dtype, shape)
        end = start + found[name].nbytes
    return found
