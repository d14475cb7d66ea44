"""Which rows of a table an n-gram has: tokens times numbers of a layer's own, joined, modulo a prime for each head.

A table holds all heads one after the other, each as many rows as its prime. Several heads look at the same n-gram, so that two
n-grams that share a row in one of them hardly do in the others.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice

import torch
from torch import Tensor

WORD = (1 << 64) - 1
GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64
LAYER = 10007  # from the seed of a layer's numbers to that of the next
WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)  # enough for numbers of 64 bits


@dataclass(frozen=True)
class Grams:
    """How n-grams are counted.

    size   of the longest; shorter ones down to pairs have heads too
    heads  of each length
    base   rows that a head has at least
    seed   of the numbers that tokens are multiplied by
    blank  the token that n-grams do not reach across, and that stands for those before the first
    """

    size: int
    heads: int
    base: int
    seed: int
    blank: int

    @property
    def count(self) -> int:
        """Heads of all lengths."""
        return (self.size - 1) * self.heads

    def multipliers(self, layer: int, vocab: int) -> Tensor:
        """The odd numbers of a layer, counting those that have tables: int64 [size]."""
        half = max(1, ((1 << 63) - 1) // max(vocab, 1) // 2)
        first = self.seed + LAYER * layer
        return torch.tensor([2 * (_split_mix(first + GAMMA * (i + 1)) % half) + 1 for i in range(self.size)])

    def head_rows(self, layer: int) -> Tensor:
        """Rows of each head of a layer, counting those that have tables: int64 [heads of all lengths]."""
        return torch.tensor(_primes(self.base, (layer + 1) * self.count)[layer * self.count :])


def offsets(sizes: Tensor) -> Tensor:
    """Where each head's rows begin, which lie one after the other: int64 [heads]."""
    return torch.tensor([0, *accumulate(sizes.tolist())][:-1])


def rows_of(histories: Tensor, grams: Grams, multipliers: Tensor, sizes: Tensor, firsts: Tensor) -> Tensor:
    """The rows of tokens that come with those before them: int64 [T, n], the newest last -> [T, heads]."""
    blank, mixed, found = histories.new_tensor(grams.blank), histories[:, -1] * multipliers[0], []
    ended = torch.zeros_like(mixed, dtype=torch.bool)
    for back in range(1, grams.size):
        token = histories[:, -1 - back]
        ended = ended | (token == blank)
        mixed = mixed ^ (torch.where(ended, blank, token) * multipliers[back])
        mine = slice((back - 1) * grams.heads, back * grams.heads)
        found.append(torch.remainder(mixed[:, None], sizes[mine]) + firsts[mine])
    return torch.cat(found, 1)


def _split_mix(value: int) -> int:
    value = (value + GAMMA) & WORD
    value = ((value ^ (value >> 30)) * MIX_1) & WORD
    value = ((value ^ (value >> 27)) * MIX_2) & WORD
    return value ^ (value >> 31)


@cache
def _primes(base: int, count: int) -> list[int]:
    """The first primes that are no smaller."""
    return [*islice(_primes_from(base), count)]


def _primes_from(number: int) -> Iterator[int]:
    while True:
        if _is_prime(number):
            yield number
        number += 1


def _is_prime(number: int) -> bool:
    """By Miller and Rabin, with witnesses that suffice."""
    if number < 2 or any(number % small == 0 for small in WITNESSES):
        return number in WITNESSES
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(pow(witness, odd, number), twos, number) for witness in WITNESSES)


def _passes(power: int, twos: int, number: int) -> bool:
    if power in (1, number - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False
