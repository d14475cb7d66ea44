"""Arguments and compile-time configuration of decode attention over codes."""

from typing import Any, NamedTuple

from torch import Tensor

from auraflux.ops.gpu.blocks.softmax import Partials
from auraflux.ops.turboquant.cuda.arguments import CodeShape, CodeTensors, FullPrecisionShape


class Codes(NamedTuple):
    """Quantized keys and values; Triton reserves the name `values` of a tuple.

    new  a `NewToken`, which has a split of its own after the others; None if it is in the cache
    """

    k: CodeTensors
    v: CodeTensors
    new: Any = None


class Output(NamedTuple):
    """Results of decode attention.

    partials  partial results of splits; None where a row has one split
    sinks     attention sink logits [query heads]; None without, or where splits are merged later
    out       [tokens, query heads, D]; None where splits are merged later
    """

    partials: Partials | None
    sinks: Tensor | None
    out: Tensor | None


class Scores(NamedTuple):
    """Scaling and masking of attention scores.

    factor  scales products of rotated queries and levels to base-2 logits, or to arguments of the softcap
    cap     softcap of base-2 logits
    window  sliding window in tokens
    """

    factor: float
    cap: float
    window: int


class Work(NamedTuple):
    """Partition of the work over splits, programs and warps.

    warps         warps per program
    depth         pipeline stages of the ring
    blocks        blocks of 16 tokens per warp and step
    prefetch      stages copied before the previous kernel has ended (programmatic dependent launch)
    single_split  one program computes a row
    balanced      programs are distributed over the sequences of a batch by length: grid (programs, heads * tiles), and `splits`
                  is the number of resident programs
    split_keys    keys per split, fixed for batch invariance, so that a row may have fewer than `splits`; 0 for equal splits
    full_split    full-precision tokens have their own split: the last, or with `split_keys` the first
    multi_split   a program computes several splits of `split_keys` keys, or with `single_split` all: grid (programs of a row,
                  heads * tiles, tokens)
    even_columns  with `split_keys`: at most four queries occupy the even columns of a product, which halves a lane's sums
    compact       the level table has half the bytes, for GPUs with little shared memory
    new_split     the new token is encoded here and has a split of its own, the last, of two programs (`new_token.py`)
    interleaved   with `new_split`: RoPE rotates neighbouring channels
    """

    warps: int
    depth: int
    blocks: int
    prefetch: int
    single_split: bool
    balanced: bool
    split_keys: int
    full_split: bool
    multi_split: bool
    even_columns: bool
    compact: bool
    new_split: bool = False
    interleaved: bool = False


class Config(NamedTuple):
    """Compile-time configuration of `attend_pairs`.

    group            query heads per key head
    window, softcap  whether the call has them
    """

    shape: CodeShape
    full: FullPrecisionShape
    work: Work
    group: int
    window: bool
    softcap: bool


class MergeSizes(NamedTuple):
    """Compile-time sizes of `finish_pairs`.

    width      of a head
    splits     most splits of a row, a power of two
    at_once    splits loaded at once
    warps      per program
    step       keys per step, where programs are balanced over sequences
    sequences  batch size, rounded up to a power of two
    balanced   programs are balanced over sequences
    """

    width: int
    splits: int
    at_once: int
    warps: int
    step: int = 0
    sequences: int = 1
    balanced: bool = False
