"""Guesses from the text so far: what followed the last time its newest tokens stood there. No model is needed."""

from auraflux.cache import Sequence

PAIR = 2  # tokens by which places are found
CANDIDATES = 16  # newest places that are looked at
LONGEST_MATCH = 32  # tokens before a place that are compared
# tokens that match, from which on guesses are of the next kind: the more there are, the likelier is what follows
KINDS = (4, 8)
COPIED = len(KINDS) + 1  # the kind of those that go on with what was being copied, after something else stood there
NEAR, SOON = 16, 32  # tokens that may have been left out or put in, and within which it goes on


class NGrams:
    """Guesses at one text, which only grows.

    free   a guess costs nothing worth counting
    kind   of the last guess: those of a kind are right about as often
    """

    free = True

    def __init__(self) -> None:
        self.kind = 0
        # where each pair of tokens has been followed by something
        self._places: dict[tuple[int, int], list[int]] = {}
        self._indexed = PAIR
        # how far back the place was that many tokens matched, and where the text ended then
        self._copying: tuple[int, int] | None = None

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Guess up to `count` tokens after these: those after the place that the longest end of the text has in common."""
        self._index(tokens)
        if len(tokens) < PAIR:
            return []
        places = self._places.get((tokens[-2], tokens[-1]), [])[-CANDIDATES:]
        if not places:
            return []
        # of equally long ones the newest; while something is copied, that
        end = len(tokens)
        long, near, length, place = max(self._judged(tokens, place) for place in places)
        self.kind = COPIED if near and not long else sum(length >= least for least in KINDS)
        if long:
            self._copying = end - place, end
        guess = tokens[place : place + count]
        # a text that runs in a circle goes on to what is guessed
        for at in range(len(guess), count):
            guess.append(guess[at - (len(tokens) - place)])
        return guess

    def _judged(self, tokens: list[int], place: int) -> tuple[bool, bool, int, int]:
        """Whether many tokens before a place match, whether it goes on with what is being copied, how many match, the place."""
        length, end = _match(tokens, place), len(tokens)
        near = False
        if self._copying is not None:
            back, since = self._copying
            near = end - since <= SOON and abs(end - place - back) <= NEAR
        return length >= KINDS[-1], near, length, place

    def found(self, tokens: list[int], held: Sequence) -> None:
        """All tokens are looked at when guesses are wanted."""

    def close(self, tokens: list[int] | None = None) -> None:
        """Nothing is held elsewhere."""

    def _index(self, tokens: list[int]) -> None:
        for place in range(self._indexed, len(tokens)):
            self._places.setdefault((tokens[place - 2], tokens[place - 1]), []).append(place)
        self._indexed = max(self._indexed, len(tokens))


def _match(tokens: list[int], place: int) -> int:
    """How many tokens before a place are those at the end of the text."""
    end, most = len(tokens), min(place, LONGEST_MATCH)
    length = PAIR
    while length < most and tokens[place - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length
