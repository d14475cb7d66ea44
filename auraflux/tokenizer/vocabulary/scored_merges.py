"""Merges of SentencePiece's BPE, which lists none: two tokens merge if they form a token, highest score first.

A vocabulary of 262,144 tokens has millions of cuts. Hashes of all prefixes and suffixes find those between two tokens.
"""

from collections.abc import Iterator, Sequence
from itertools import starmap
from operator import add

import numpy as np
from numpy.typing import NDArray

from auraflux.errors import FormatError

Pairs = list[tuple[str, str]]
Integers = NDArray[np.int64]
Words = NDArray[np.uint64]
FACTOR = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
INVERSE = pow(FACTOR, -1, 1 << 64)
SLOTS = 8  # of the hash table, for each token


def scored_merges(tokens: Sequence[str], scores: Sequence[float]) -> Pairs:
    """Return the pairs of tokens that merge, in order; of equal scores, only runs of one character have an order."""
    keys, kept = np.array(scores, np.float64), np.array([*map(len, tokens)], np.int64)
    order = np.argsort(-keys, kind="stable")
    ranked, single = order[kept[order] > 1], order[kept[order] == 1]
    names = _select(tokens, np.concatenate((ranked, single)))
    found = _hashed_cuts(names, len(ranked))
    owners, pairs = _cuts(names, len(ranked)) if found is None else found
    for first, last in _equal(keys[ranked]):
        some = slice(*np.searchsorted(owners, (first, last)))
        if pairs[some]:
            pairs[some] = _in_order(names[first:last], pairs[some], keys[ranked[first]])
    return pairs


def _equal(ranked: NDArray[np.float64]) -> Iterator[tuple[int, int]]:
    """Yield the first and last index of groups of equal scores."""
    starts = np.flatnonzero(np.diff(ranked, prepend=np.nan) != 0)
    ends = np.append(starts[1:], len(ranked))
    yield from zip(starts[ends - starts > 1].tolist(), ends[ends - starts > 1].tolist(), strict=True)


def _in_order(same: list[str], pairs: Pairs, score: float) -> Pairs:
    """Return the pairs of tokens with the same score, in the order in which they merge."""
    if not _is_runs(same):
        raise FormatError(
            f"The GGUF file gives {same[0]!r} and {same[1]!r} the same score {score}, so their merge order is ambiguous."
        )
    return sorted(pairs, key=lambda pair: (pair[0] != pair[1], len(pair[0] + pair[1])))


def _is_runs(tokens: list[str]) -> bool:
    """Return whether the tokens repeat one character 2, 3, 4 ... 2**n times, as Llama's spaces do.

    Of equal scores the leftmost pair merges first, so a run grows from the left up to the longest token. Merging equal halves
    first gives the same result where the longest is a power of two.
    """
    lengths, longest = sorted(map(len, tokens)), len(max(tokens, key=len))
    return len(set("".join(tokens))) == 1 and lengths == list(range(2, longest + 1)) and longest & (longest - 1) == 0


def _cuts(names: list[str], count: int) -> tuple[Integers, Pairs]:
    """Return the cuts of the first `count` names between two names: the index of each cut name, and its parts."""
    known, owners, pairs = set(names), [], []
    for owner, name in enumerate(names[:count]):
        for cut in range(1, len(name)):
            if name[:cut] in known and name[cut:] in known:
                owners.append(owner)
                pairs.append((name[:cut], name[cut:]))
    return np.array(owners, np.int64), pairs


def _hashed_cuts(names: list[str], count: int) -> tuple[Integers, Pairs] | None:
    """Return what `_cuts` returns; None if hashes of different strings are equal, which a file can arrange."""
    text = _Text(names)
    ends = np.cumsum(text.lengths)
    starts = ends - text.lengths
    index = _Index(text.hashes(starts, ends))
    if index.is_ambiguous:
        return None
    owners = np.repeat(np.arange(count), text.lengths[:count] - 1)
    # all positions within the first names but their first
    cuts = np.arange(len(owners)) + owners + 1
    left = index.find(text.hashes(starts[owners], cuts))
    owners, cuts, left = (each[left >= 0] for each in (owners, cuts, left))
    right = index.find(text.hashes(cuts, ends[owners]))
    owners, cuts, left, right = (each[right >= 0] for each in (owners, cuts, left, right))
    pairs = list(zip(_select(names, left), _select(names, right), strict=True))
    is_exact = np.array_equal(text.lengths[left], cuts - starts[owners]) and [*starmap(add, pairs)] == _select(names, owners)
    return (owners, pairs) if is_exact else None


def _select(names: Sequence[str], indexes: Integers) -> list[str]:
    return [names[i] for i in indexes.tolist()]


class _Text:
    """Strings one after the other, with polynomials of their characters modulo 2**64.

    lengths  [N]  of the strings
    """

    def __init__(self, names: list[str]):
        self.lengths = np.array([*map(len, names)], np.int64)
        points = np.frombuffer("".join(names).encode("utf-32-le"), "<u4").astype(np.uint64)
        powers, inverses = (np.full(len(points) + 1, factor, np.uint64) for factor in (FACTOR, INVERSE))
        powers[0] = inverses[0] = 1
        np.cumprod(powers, out=powers)
        self._inverses = np.cumprod(inverses)
        self._sums = np.zeros(len(points) + 1, np.uint64)
        np.cumsum((points + np.uint64(1)) * powers[:-1], out=self._sums[1:])

    def hashes(self, first: Integers, last: Integers) -> Words:
        """Return the hashes of the strings from `first` up to `last`."""
        found = (self._sums[last] - self._sums[first]) * self._inverses[first]
        # the high bits, which `_Index` reads, depend on all others
        found ^= found >> np.uint64(32)
        return found * np.uint64(FACTOR)


class _Index:
    """A hash table of hashes, with one slot for each of their first bits; a sorted list has those whose slot is taken.

    is_ambiguous  whether two hashes are equal
    """

    def __init__(self, known: Words):
        self._known, bits = known, (SLOTS * len(known)).bit_length()
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros(1 << bits, np.int32)
        self._table[known >> self._shift] = np.arange(len(known), dtype=np.int32)
        holder = self._table[known >> self._shift]
        rest = np.flatnonzero(holder != np.arange(len(known)))
        self._rest = rest[np.argsort(known[rest])]
        ordered = known[self._rest]
        self.is_ambiguous = bool((known[holder[rest]] == known[rest]).any() or (ordered[1:] == ordered[:-1]).any())

    def find(self, hashes: Words) -> Integers:
        """Return the index of each hash; -1 for an unknown one."""
        found = self._table[hashes >> self._shift].astype(np.int64)
        missed = np.flatnonzero(self._known[found] != hashes)
        found[missed] = -1
        if len(self._rest):
            place = np.searchsorted(self._known[self._rest], hashes[missed]).clip(max=len(self._rest) - 1)
            others = self._rest[place]
            is_other = self._known[others] == hashes[missed]
            found[missed[is_other]] = others[is_other]
        return found
