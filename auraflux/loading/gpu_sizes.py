"""Bytes of a model's parts in the layout of GPU kernels, from headers only."""

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field

from auraflux.models.config import experts_per_token
from auraflux.ops.moe.pool import aligned
from auraflux.weights.experts.packed_files import ExpertFiles
from auraflux.weights.experts.pool.gpu_pool import STREAM_TOKENS
from auraflux.weights.experts.pool.host_memory import ALIGNMENT as LAYER_ALIGNMENT
from auraflux.weights.experts.row_table import ON_DISK_TABLE
from auraflux.weights.formats.stored import Checkpoint
from auraflux.weights.memory_plan import COPIES, gpu_weight_bits, part_of
from auraflux.weights.names import Rename
from auraflux.weights.names import ours as our_name

GRAPHS_NBYTES = 400 * 10**6  # graphs, and kernels' buffers that do not depend on the chunk
LAYER = re.compile(r"^(.*?)\.(?:switch_mlp|experts)\.(?:(\d+)\.)?")


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of a model's experts.

    layers  mixture layers
    count   experts of each
    k       experts per token
    inner   width of an expert
    nbytes  of an expert, the largest of any layer
    total   bytes of all experts
    """

    layers: int
    count: int
    k: int
    inner: int
    nbytes: int
    total: int

    @property
    def min_nbytes(self) -> int:
        """Bytes of the fewest slots: the experts of one token, in every layer."""
        return self.layers * self.k * self.nbytes

    @property
    def host_nbytes(self) -> int:
        """Host memory for all experts."""
        return self.total + (self.layers + 1) * LAYER_ALIGNMENT


@dataclass(frozen=True)
class GpuSizes:
    """Sizes of a model on a GPU.

    weights  bytes of all weights but experts
    hidden   width of the residual stream
    experts  None for a model without
    """

    weights: int
    hidden: int
    experts: ExpertSizes | None = None

    @property
    def total(self) -> int:
        return self.weights + (0 if self.experts is None else self.experts.total)

    def workspace(self, chunk: int) -> int:
        """Estimate the bytes of a prefill chunk's activations, and of CUDA graphs."""
        per_token = 32 * self.hidden
        if self.experts is not None:
            per_token += int(self.experts.k * (2.2 * self.hidden + 2 * self.experts.inner))
        return chunk * per_token + GRAPHS_NBYTES

    def streaming_workspace(self, chunk: int) -> int:
        """Estimate the workspace where prefill steps stream experts for several chunks, all of which have a residual stream."""
        return self.workspace(chunk) + 2 * self.hidden * max(0, STREAM_TOKENS - chunk)


@dataclass
class _Layer:
    """Experts of a layer: bytes and weights of all, and the numbers or the length of stacks that give their count."""

    nbytes: float = 0.0
    parameters: int = 0
    numbers: set[int] = field(default_factory=set)
    stacked: int = 0

    @property
    def count(self) -> int:
        return max(len(self.numbers), self.stacked, 1)


def gpu_sizes(
    checkpoint: Checkpoint,
    rename: Rename,
    hidden: int,
    bits: int | None = None,
    mtp_prefixes: tuple[str, ...] = (),
    mtp: bool = False,
) -> GpuSizes:
    """Add up a checkpoint's tensors, as they are loaded onto a GPU.

    bits          quantization of dense matrices at load time; None loads them unquantized
    mtp_prefixes  prefixes of the MTP head's tensor names
    mtp           count the MTP head too
    """
    weights, layers = 0.0, defaultdict[str, _Layer](_Layer)
    for name in checkpoint.sizes():
        ours = our_name(name, rename, bool(mtp_prefixes))
        if ours is None or ON_DISK_TABLE.search(ours):
            continue
        if ours.startswith(mtp_prefixes) and (not mtp or COPIES.search(ours)):
            continue
        shape = checkpoint.shape(name)
        nbytes = math.prod(shape) * gpu_weight_bits(checkpoint, name, ours, bits) / 8
        found = LAYER.match(ours) if part_of(ours) == "experts" else None
        if found is None:
            weights += nbytes
            continue
        layer = layers[found[1]]
        layer.nbytes += nbytes
        layer.parameters += math.prod(shape)
        if found[2] is not None:
            layer.numbers.add(int(found[2]))
        else:
            layer.stacked = max(layer.stacked, shape[0])
    k = experts_per_token(checkpoint.config) if layers or checkpoint.experts is not None else 0
    experts = None
    if checkpoint.experts is not None:
        files = checkpoint.experts if mtp else checkpoint.experts.without(mtp_prefixes)
        experts = _packed_sizes(files, k, {name: layer.nbytes for name, layer in layers.items()})
    elif layers:
        each = [aligned(math.ceil(layer.nbytes / layer.count)) for layer in layers.values()]
        counts = [layer.count for layer in layers.values()]
        total = sum(nbytes * count for nbytes, count in zip(each, counts, strict=True))
        inner = max(layer.parameters // (3 * hidden * layer.count) for layer in layers.values())
        experts = ExpertSizes(len(layers), max(counts), k, inner, max(each), total)
    return GpuSizes(math.ceil(weights), hidden, experts)


def _packed_sizes(files: ExpertFiles, k: int, biases: dict[str, float]) -> ExpertSizes | None:
    """Return the sizes of packed experts; their biases are tensors of the checkpoint."""
    if not files.files:
        return None
    each = [aligned(file.nbytes + math.ceil(biases.get(file.module, 0.0) / files.count)) for file in files.files]
    return ExpertSizes(len(each), files.count, k, files.inner, max(each), sum(each) * files.count)
