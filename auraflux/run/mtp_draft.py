"""Guesses of a model's own further layer (MTP), for all texts of a batch together.

The layer is given what the model made of each token of a text, and the token that came next. Whoever runs the model tells of
these as they are found, `hear`; they wait until there are guesses to make, or too many of them. What the layer keeps of a text
is in a cache of its own, beginning where the model began to compute: a prefix that was found in the model's cache is left out.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from auraflux.cache import Batch, Cache
from auraflux.errors import AurafluxError
from auraflux.ops import exact

WAITING = 256  # results of a text that wait to be read, at most


class Asked(NamedTuple):
    """A text's draft, its tokens, and how many guesses are wanted."""

    draft: "MTPDraft"
    tokens: list[int]
    count: int


class MTPDraft:
    """What the layer has read of one text.

    free   False: guesses take steps of the layer
    kind   all are alike
    heard  tokens of the text of which results are known, or not missed
    """

    free, kind = False, 1

    def __init__(self, drafts: "MTPDrafts"):
        self._drafts, self.heard = drafts, 0
        self._sequence = drafts.cache.open()
        # results, and where they begin in the text
        self._waiting: list[tuple[int, Tensor]] = []
        # the layer's result for the last pair it was given
        self._last: Tensor | None = None

    @property
    def waiting(self) -> int:
        """Results that are not read yet."""
        return sum(len(rows) for _, rows in self._waiting)
