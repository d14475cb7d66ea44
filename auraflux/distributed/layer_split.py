"""Split of layers into pipeline stages that balances the memory use of ranks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from auraflux.errors import SettingsError
from auraflux.weights.formats.stored import Checkpoint
from auraflux.weights.names import Rename

LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a model's weights in bytes.

    layers  of each layer
    ends    of the embedding, the final norm and the LM head
    """

    layers: list[int]
    ends: int

    def of(self, layers: range) -> int:
        """Return the bytes of a stage with these layers."""
        return sum(self.layers[number] for number in layers) + (self.ends if layers.start == 0 else 0)


def layer_sizes(checkpoint: Checkpoint, rename: Rename, layers: int) -> LayerSizes:
    """Sum the tensors of a checkpoint by layer, packed experts included."""
    found, ends = [0] * layers, 0
    named = [(rename(name), nbytes) for name, nbytes in checkpoint.sizes().items()]
    if checkpoint.experts is not None:
        named += [(f"{file.module}.", file.file_nbytes) for file in checkpoint.experts.files]
    for name, nbytes in named:
        layer = LAYER.match(name or "")
        if layer is None:
            ends += nbytes if name else 0
        elif int(layer[1]) < layers:
            found[int(layer[1])] += nbytes
    return LayerSizes(found, ends)


def split_layers(sizes: LayerSizes, memory: Sequence[int]) -> list[range]:
    """Assign consecutive layers to ranks, at least one each, so that the largest memory use relative to `memory` is minimal."""
    count, layers = len(memory), len(sizes.layers)
    if count > layers:
        raise SettingsError(f"a model of {layers} layers cannot be split into {count} pipeline stages.")
    before = list(accumulate(sizes.layers, initial=sizes.ends))
    # by rank, then by end layer: the minimal peak memory use up to this rank, and the start layer of this rank
    found = [{end: (before[end] / max(memory[0], 1), 0) for end in range(1, layers + 1)}]
    for rank in range(1, count):
        available, previous = max(memory[rank], 1), found[-1]
        found.append(
            {
                end: min(
                    (max(previous[start][0], (before[end] - before[start]) / available), start) for start in range(rank, end)
                )
                for end in range(rank + 1, layers + 1)
            }
        )
    stages, end = [], layers
    for rank in range(count - 1, -1, -1):
        start = found[rank][end][1]
        stages.append(range(start, end))
        end = start
    return stages[::-1]
