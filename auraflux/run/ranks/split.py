"""Which layers each rank of a pipeline has: consecutive ones, so that none's memory is fuller than need be."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from auraflux.errors import SettingsError
from auraflux.weights.loader import Rename
from auraflux.weights.stored import Checkpoint

LAYER = re.compile(r"model\.layers\.(\d+)\.")
ROUNDS = 60  # of halving an interval of shares, until no double is between its ends


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
    count = len(memory)
    if count > len(sizes.layers):
        raise SettingsError(f"a model of {len(sizes.layers)} layers cannot be divided among {count} ranks.")
    low, high = 0.0, (sum(sizes.layers) + sizes.ends + 1) / max(min(memory), 1)
    best = _filled(sizes, memory, high)
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        found = _filled(sizes, memory, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    assert best is not None, "any rank has room for all at the largest share"
    return best


def _filled(sizes: Sizes, memory: Sequence[int], share: float) -> list[range] | None:
    """Fill ranks one after the other up to a share of their memory; None if layers are left, or a rank's first is too large."""
    made: list[range] = []
    first, layers = 0, len(sizes.layers)
    for rank, room in enumerate(memory):
        after = len(memory) - rank - 1
        end = first + 1
        if sizes.of(range(first, end)) > share * room:
            return None
        while end < layers - after and sizes.of(range(first, end + 1)) <= share * room:
            end += 1
        made.append(range(first, end))
        first = end
    return made if first == layers else None
