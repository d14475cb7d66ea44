"""The hash of n-grams to embedding rows: token ids times a layer's multipliers, xor-ed, modulo a prime per head.

A table concatenates all heads, each with as many rows as its prime. Several heads hash the same n-gram, so two n-grams that
collide in one head rarely collide in the others.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice

import torch
from torch import Tensor

WORD = (1 << 64) - 1
GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64
LAYER = 10007  # step of the seed from layer to layer
WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)  # exact for 64 bits


@dataclass(frozen=True)
class Grams:
    """The sizes of the n-gram hash.

    size   of the longest n-gram; shorter ones down to pairs have heads too
    heads  per length
    base   least rows of a head
    seed   of the multipliers
    blank  the token that ends an n-gram, and stands for tokens before the first
    """

    size: int
    heads: int
    base: int
    seed: int
    blank: int

    @property
    def count(self) -> int:
        """Return the number of heads of all lengths."""
        return (self.size - 1) * self.heads

    def multipliers(self, layer: int, vocab: int) -> Tensor:
        """Return the odd multipliers of the n-th layer with a table: int64 [size]."""
        half = max(1, ((1 << 63) - 1) // max(vocab, 1) // 2)
        first = self.seed + LAYER * layer
        return torch.tensor([2 * (_split_mix(first + GAMMA * (i + 1)) % half) + 1 for i in range(self.size)])

    def head_rows(self, layer: int) -> Tensor:
        """Return the rows of each head of the n-th layer with a table: int64 [count]."""
        return torch.tensor(_primes(self.base, (layer + 1) * self.count)[layer * self.count :])


def offsets(sizes: Tensor) -> Tensor:
    """Return the first row of each head in the concatenated table: int64 [heads]."""
    return torch.tensor([0, *accumulate(sizes.tolist())][:-1])


def rows_of(histories: Tensor, grams: Grams, multipliers: Tensor, sizes: Tensor, firsts: Tensor) -> Tensor:
    """Return the rows of tokens with their predecessors: int64 [T, n], the newest last -> [T, heads]."""
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
    """Return the first `count` primes from `base` on."""
    return [*islice(_primes_from(base), count)]


def _primes_from(number: int) -> Iterator[int]:
    while True:
        if _is_prime(number):
            yield number
        number += 1


def _is_prime(number: int) -> bool:
    """Test a number for primality with Miller-Rabin witnesses that are exact for 64 bits."""
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
