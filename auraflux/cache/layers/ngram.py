"""Delta layers with n-gram embeddings: they also store the last tokens and the inputs of a dilated convolution.

Both have a fixed size and lie with the recurrent states, so forks, checkpoints and slot moves apply to them.
"""

import torch
from torch import Tensor

from auraflux.cache.batch import Batch
from auraflux.cache.layers.recurrent import RecurrentLayer, StateGroup
from auraflux.ops.ngram.reference import far_conv


class NGramLayer(RecurrentLayer):
    """The state of a delta layer and of its n-grams.

    tokens    last tokens, stored minus `blank`, so that a cleared state means none
    dilated   last inputs of the dilated convolution
    """

    def __init__(
        self,
        group: StateGroup,
        sizes: tuple[int, int, int, int],
        dtype: torch.dtype,
        history_tokens: int,
        conv_inputs: int,
        conv_width: int,
    ):
        super().__init__(group, *sizes, dtype)
        self.tokens = group.zeros(history_tokens, dtype=torch.int64)
        self.dilated = group.zeros(conv_inputs, conv_width, dtype=dtype)

    def histories(self, batch: Batch, ids: Tensor, blank: int) -> Tensor:
        """Return each new token with those before it, the newest last, and store the last ones: [T] -> [T, n]."""
        ids, before = ids.long() - blank, self.tokens.shape[1]
        if batch.single:
            slots = batch.view(self)
            histories = torch.cat([self.tokens[slots], ids[:, None]], 1)
            self.tokens[slots] = histories[:, 1:]
            return histories + blank
        found = []
        for slot, mine in zip(batch.slots, ids.split(batch.counts), strict=True):
            if not len(mine):
                continue
            history = torch.cat([self.tokens[slot], mine])
            found.append(history.unfold(0, before + 1, 1))
            # padding tokens are not stored
            last = len(history) - (batch.padding or 0)
            self.tokens[slot] = history[last - before : last]
        return torch.cat(found) + blank

    def convolve_dilated(self, batch: Batch, x: Tensor, weight: Tensor, step: int) -> Tensor:
        """Run the new tokens through the dilated convolution, see `far_conv`: [T, C] -> [T, C]."""
        return self._run_conv(batch, self.dilated, lambda state, starts: far_conv(x, state, weight, starts, step))
