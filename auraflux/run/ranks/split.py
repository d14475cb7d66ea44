"""Which layers each rank of a pipeline has: consecutive ones, so that none's memory is fuller than need be."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from auraflux.errors import SettingsError
from auraflux.weights.names import Rename
from auraflux.weights.stored import Checkpoint

LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's weights.

    layers  of each one
    ends    of the embedding, the last norm and the head
    """

    layers: list[int]
    ends: int

    def of(self, held: range) -> int:
        """What a rank with these layers has."""
        return sum(self.layers[number] for number in held) + (self.ends if held.start == 0 else 0)


def sizes_of(checkpoint: Checkpoint, rename: Rename, layers: int) -> Sizes:
    """Add up a checkpoint's tensors, packed experts too, by layers."""
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
    return Sizes(found, ends)


def split(sizes: Sizes, memory: Sequence[int]) -> list[range]:
    """Deal layers out to ranks with so much memory, one at least to each; the share of it that the fullest uses is least."""
    count, layers = len(memory), len(sizes.layers)
    if count > layers:
        raise SettingsError(f"a model of {layers} layers cannot be divided among {count} ranks.")
    before = list(accumulate(sizes.layers, initial=sizes.ends))
    # for every number of first layers, the least share of those ranks that have them, and where the last of these begins
    found = [{end: (before[end] / max(memory[0], 1), 0) for end in range(1, layers + 1)}]
    for rank in range(1, count):
        room, least = max(memory[rank], 1), found[-1]
        found.append(
            {
                end: min((max(least[start][0], (before[end] - before[start]) / room), start) for start in range(rank, end))
                for end in range(rank + 1, layers + 1)
            }
        )
    parts, end = [], layers
    for rank in range(count - 1, -1, -1):
        start = found[rank][end][1]
        parts.append(range(start, end))
        end = start
    return parts[::-1]
