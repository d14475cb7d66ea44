"""Delta layers that read embeddings of n-grams too: beside their state they keep the last tokens and a convolution's inputs.

Both are as large after one token as after a million, and lie with the recurrent states: whatever is done to these, forks,
checkpoints and moves, is done to them.
"""

import torch
from torch import Tensor

from auraflux.cache.batch import Batch
from auraflux.cache.recurrent import RecurrentLayer, StateGroup
from auraflux.ops.ngram.reference import far_conv


class NGramLayer(RecurrentLayer):
    """The state of a delta layer, and what its n-grams need.

    tokens  before the next one; they are stored less `blank`, so that a state that is cleared says there were none
    far     inputs of the convolution that reaches back
    """

    def __init__(
        self, group: StateGroup, sizes: tuple[int, int, int, int], dtype: torch.dtype, before: int, reach: int, wide: int
    ):
        super().__init__(group, *sizes, dtype)
        self.tokens = group.zeros(before, dtype=torch.int64)
        self.far = group.zeros(reach, wide, dtype=dtype)

    def histories(self, batch: Batch, ids: Tensor, blank: int) -> Tensor:
        """Give each new token with those before it, the newest last, and remember the last ones: [T] -> [T, n]."""
        ids, before = ids.long() - blank, self.tokens.shape[1]
        if batch.single:
            slots = batch.view(self)
            lines = torch.cat([self.tokens[slots], ids[:, None]], 1)
            self.tokens[slots] = lines[:, 1:]
            return lines + blank
        found = []
        for slot, mine in zip(batch.places, ids.split(batch.counts), strict=True):
            if not len(mine):
                continue
            line = torch.cat([self.tokens[slot], mine])
            found.append(line.unfold(0, before + 1, 1))
            # extra tokens come to nothing
            last = len(line) - (batch.extra or 0)
            self.tokens[slot] = line[last - before : last]
        return torch.cat(found) + blank

    def convolve_far(self, batch: Batch, x: Tensor, weight: Tensor, step: int) -> Tensor:
        """Run the new tokens through the convolution that reaches back, see `far_conv`: [T, C] -> [T, C]."""
        return self._carried(batch, self.far, lambda state, starts: far_conv(x, state, weight, starts, step))
