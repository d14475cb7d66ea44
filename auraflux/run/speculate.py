"""Speculation: texts are given guesses at their next tokens, which one step of the model checks together.

What a step would have chosen after each token decides, with the random number of that place in the text: guesses that agree are
kept, the first that does not is replaced, and those after it are dropped. So the text is the one that would have been written
without guesses, drawn tokens too; only its speed changes.

Tokens are added to a step in order of how likely they are to be kept, as long as that promises more tokens per second. What
steps take is measured. Guesses that cost nothing are also held against the text while they are not used, so that those of a
text which does not repeat itself are never tried.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from statistics import median, median_low
from typing import Any, Protocol, TypeVar

from torch import Tensor

from auraflux.cache import Sequence as Held
from auraflux.cache.radix import common_length

MOST = 15  # guesses for a text at once: windows keep room to take back twice as many
MARGIN = 1.05  # by which a step must promise to be worth more than a plain one
LIKELIEST = 0.98
# how often guesses of a kind are right before anything is known, and how many tokens of experience that is worth
PRIORS, WEIGHT = (0.3, 0.6, 0.85, 0.8), 4.0
FADE = 0.9  # of experience with each guess
REMEMBERED = 9  # measurements; their median counts
FIRST = 1  # measurement that is left out: it may compile
SMALL = 3  # tokens more than texts with which steps are tried first
CHEAP = 0.15  # of a step for one more token a text, while that is not known
# the same for guesses that need not be tried to be judged, since they are held against the text: as on two Neoverse-N1 cores
DEAR = 0.4
FRESH = 32  # steps after which a plain one is taken, so that it is known what that takes
# right guesses that were not used, for which a step of a new size is recorded: that takes as long as a dozen plain steps
RENT, DEARER = 16, 1.1  # and by how much it must be worth more than one that is known
PATIENCE = 64  # plain steps after which guesses that did not pay are tried again; then twice as many


class Draft(Protocol):
    """Where guesses at one text come from.

    free  they cost nothing worth counting
    kind  of the last guess: those of a kind are right about as often
    """

    free: bool
    kind: int

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Guess up to `count` tokens after these."""

    def found(self, tokens: list[int], held: Held) -> None:
        """Learn what the model's cache has of a text before it is read; that may be cut, so that more is read again."""

    def close(self, tokens: list[int] | None = None) -> None:
        """Give back what is held for the text; if its tokens are told, it may be kept for others that begin like it."""


DraftT = TypeVar("DraftT")
Asked = tuple[DraftT, list[int], int]  # a text's draft, its tokens, and how many guesses are wanted
Told = tuple[DraftT, list[int], int, Tensor]  # a text's draft, its tokens, and what the model made of those from a place on


def one_by_one(asked: list[Asked[Draft]]) -> list[list[int]]:
    """Guess at each text by itself."""
    return [draft.propose(tokens, count) for draft, tokens, count in asked]


class Text(Protocol):
    """A text that may be given guesses; `room` is how many tokens may follow the next."""

    ids: list[int]
    guesses: "Guesses | None"

    @property
    def room(self) -> int: ...


class Odds:
    """How often guesses are right, as counts that fade."""

    def __init__(self, share: float, weight: float = WEIGHT):
        self._right, self._wrong = share * weight, (1 - share) * weight

    @property
    def share(self) -> float:
        return min(self._right / (self._right + self._wrong), LIKELIEST)

    def note(self, right: int, wrong: int) -> None:
        self._right, self._wrong = FADE * self._right + right, FADE * self._wrong + wrong


class Guesses:
    """Guesses at one text, and what became of them.

    drafted   tokens that were checked
    accepted  of them that were kept
    """

    def __init__(self, draft: Draft, pooled: "Pooled"):
        self.draft, self.drafted, self.accepted = draft, 0, 0
        self._pooled = pooled
        self._odds: dict[tuple[int, int], Odds] = {}
        # guesses that are not used, where they begin in the text, and their kind
        self._watched: tuple[int, list[int], int] | None = None

    def offer(self, ids: list[int], room: int) -> list[float]:
        """How likely each of the next guesses is to be kept: all before it must be right, too."""
        count = min(room, MOST)
        if self.draft.free and count > 0:
            count = len(self._watch(ids, count))
        return list(accumulate((self._of(self.draft.kind, depth).share for depth in range(count)), mul))

    def ask(self, ids: list[int], count: int) -> Asked[Draft]:
        """Ask for so many guesses, to be checked."""
        self._watched = None
        return self.draft, ids, count

    def note(self, drafted: int, accepted: int) -> None:
        """Learn how many of the guesses given last were right."""
        self.drafted += drafted
        self.accepted += accepted
        self._learn(self.draft.kind, accepted, accepted < drafted)
        # more of them might have been right
        self._pooled.missed += accepted // 2 if accepted == drafted else 0

    def reset(self) -> None:
        """Forget how often guesses were right."""
        self._odds.clear()

    def _watch(self, ids: list[int], count: int) -> list[int]:
        if self._watched is not None:
            start, guess, kind = self._watched
            known = ids[start : start + len(guess)]
            right = common_length(guess, known)
            if right < len(known) or len(known) == len(guess):
                self._learn(kind, right, right < len(guess))
                self._pooled.missed += right if right >= SMALL else 0
                self._watched = None
        found = self.draft.propose(ids, count)
        if found and self._watched is None:
            self._watched = len(ids), found, self.draft.kind
        return found

    def _of(self, kind: int, depth: int) -> Odds:
        # what is copied is as likely to go on after many tokens as after one; a model's own guesses grow worse
        key = kind, 0 if self.draft.free else depth
        if key not in self._odds:
            self._odds[key] = Odds(self._pooled[key].share)
        return self._odds[key]

    def _learn(self, kind: int, right: int, wrong: bool) -> None:
        if self.draft.free:
            self._note(kind, 0, right, int(wrong))
            return
        for depth in range(right):
            self._note(kind, depth, 1, 0)
        if wrong:
            self._note(kind, right, 0, 1)

    def _note(self, kind: int, depth: int, right: int, wrong: int) -> None:
        own = self._of(kind, depth)
        for odds in (own, self._pooled[kind, 0 if self.draft.free else depth]):
            odds.note(right, wrong)


class Pooled(dict[tuple[int, int], Odds]):
    """What is known of guesses at all texts, by their kind and by how many are before them in a step.

    missed  right ones that were not used
    """

    missed = 0

    def __missing__(self, key: tuple[int, int]) -> Odds:
        return self.setdefault(key, Odds(PRIORS[key[0]]))


class Costs:
    """What steps take that give texts more than one token each, measured against those that do not.

    unknown  of a step for one more token a text, while that is not known
    """

    def __init__(self) -> None:
        self._plain: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._ratios: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._left_out: dict[tuple[int, int], int] = defaultdict(int)
        self.unknown = CHEAP

    def note(self, texts: int, more: int, seconds: float) -> None:
        """Learn what a step of so many texts took, with so many tokens more than texts."""
        self._left_out[texts, more] += 1
        if self._left_out[texts, more] <= FIRST:
            return
        if more == 0:
            self._plain[texts].append(seconds)
        elif self._plain[texts]:
            self._ratios[texts, more].append(seconds / median(self._plain[texts]))

    def reach(self, texts: int) -> int:
        """How many tokens more a step may have; it is tried with few first."""
        return 2 * max(self._known(texts)) + 1 if len(self._known(texts)) > 1 else SMALL

    def ratio(self, texts: int, more: int) -> float:
        """How many plain steps such a step takes as long as; beyond the first that was measured, tokens are thought cheap."""
        if not self._plain[texts]:
            return float("inf")
        known = self._known(texts)
        below = max(n for n in known if n <= more)
        above = min((n for n in known if n > more), default=None)
        if below == more:
            return known[more]
        if above is not None:
            slope = (known[above] - known[below]) / (above - below)
        elif below == 0:
            slope = self.unknown / texts
        else:
            before = max(n for n in known if n < below)
            slope = max(0.0, (known[below] - known[before]) / (below - before)) * (0.5 if before == 0 else 1.0)
        return known[below] + slope * (more - below)

    def _known(self, texts: int) -> dict[int, float]:
        # of few measurements the smaller ones: whatever else a machine does makes them larger
        measured = {n: median_low(taken) for (b, n), taken in self._ratios.items() if b == texts and taken}
        return {0: 1.0, **measured}

    def forget(self) -> None:
        """Forget all but what plain steps take."""
        self._ratios.clear()


class Speculation:
    """Decides what is guessed, for all texts of a scheduler.

    begin     makes a draft for a text
    limit     most tokens of a step
    propose   guesses at several texts
    hear      is told what the model makes of tokens; None where nobody wants to know
    drafted   tokens that were checked
    accepted  of them that were kept
    """

    def __init__(
        self,
        begin: Callable[[], Draft],
        limit: int,
        propose: Callable[[list[Asked[Any]]], list[list[int]]] = one_by_one,
        hear: Callable[[list[Told[Any]]], None] | None = None,
    ):
        self._begin, self._limit, self.costs = begin, limit, Costs()
        self._propose, self._hear = propose, hear
        self.drafted = self.accepted = 0
        self._pooled = Pooled()
        self._plain_steps = self._steps = 0
        self._patience = PATIENCE

    def begin(self) -> Guesses:
        """Guess at a new text."""
        draft = self._begin()
        self.costs.unknown = DEAR if draft.free else CHEAP
        return Guesses(draft, self._pooled)

    def forget_counts(self) -> None:
        """Count guesses from here on."""
        self.drafted = self.accepted = 0

    def promises(self, texts: Sequence[Text]) -> bool:
        """Whether guesses would be worth while, as far as the texts are known."""
        return any(self._counts(texts))

    def plan(self, texts: Sequence[Text], is_known: Callable[[int], bool] = lambda more: True) -> list[list[int]]:
        """The guesses that the next step checks, for each text; none where they would not pay.

        is_known  whether a step with so many tokens more than texts has been recorded, so that it takes no longer than others
        """
        counts = self._counts(texts, is_known) if self._steps < FRESH else [0] * len(texts)
        if not any(counts):
            self._wait(texts)
            return [[] for _ in texts]
        self._steps, self._plain_steps = self._steps + 1, 0
        asked = {
            number: text.guesses.ask(text.ids, count)
            for number, (text, count) in enumerate(zip(texts, counts, strict=True))
            if text.guesses is not None and count
        }
        found = dict(zip(asked, self._propose(list(asked.values())), strict=True))
        return [found.get(number, []) for number in range(len(texts))]

    def hear(self, texts: Sequence[tuple[Text, int, Tensor]]) -> None:
        """Learn what the model made of tokens of texts, from a place in each on: [T, H]."""
        told = [(text.guesses.draft, text.ids, start, rows) for text, start, rows in texts if text.guesses is not None]
        if self._hear is not None and told:
            self._hear(told)

    def note(self, texts: Sequence[Text], drafts: list[list[int]], kept: list[int], seconds: float | None) -> None:
        """Learn what a step took, None where that says nothing of others, and how many guesses of each text were kept."""
        for text, draft, count in zip(texts, drafts, kept, strict=True):
            if text.guesses is not None and draft:
                text.guesses.note(len(draft), count)
        more = sum(map(len, drafts))
        self.drafted += more
        self.accepted += sum(kept)
        if seconds is not None:
            self.costs.note(len(texts), more, seconds)
        if more and (len(texts) + sum(kept)) / len(texts) > MARGIN * self.costs.ratio(len(texts), more):
            self._patience = PATIENCE

    def _wait(self, texts: Sequence[Text]) -> None:
        """Count a plain step; after many of them think better of guesses again."""
        self._steps = 0
        self._plain_steps += 1
        if self._plain_steps >= self._patience:
            self._plain_steps, self._patience = 0, 2 * self._patience
            self.costs.forget()
            for text in texts:
                if text.guesses is not None and not text.guesses.draft.free:
                    text.guesses.reset()

    def _counts(self, texts: Sequence[Text], is_known: Callable[[int], bool] = lambda more: True) -> list[int]:
        """How many guesses each text gets: the likeliest of all, as many as make the step worth most."""
        offers = [[] if text.guesses is None else text.guesses.offer(text.ids, text.room) for text in texts]
        chances = [(chance, number) for number, offer in enumerate(offers) for chance in offer]
        chances.sort(key=lambda chance: -chance[0])
        costly = any(text.guesses is not None and not text.guesses.draft.free for text in texts)
        chosen = chances[: self._best([chance for chance, _ in chances], len(texts), costly, is_known)]
        counts = [0] * len(texts)
        for _, number in chosen:
            counts[number] += 1
        return counts

    def _best(self, chances: list[float], texts: int, costly: bool, is_known: Callable[[int], bool]) -> int:
        best, most = 0, MARGIN
        for more in sizes(min(len(chances), self._limit - texts, self.costs.reach(texts)), costly):
            worth = (texts + sum(chances[:more])) / texts / self.costs.ratio(texts, more)
            # guesses that are not held against the text before they are used must be tried
            known = costly or is_known(more)
            if worth > (most if known else most * DEARER) and (known or self._pooled.missed >= RENT):
                best, most = more, worth
        if best and not costly and not is_known(best):
            self._pooled.missed = 0
        return best


def sizes(most: int, costly: bool) -> list[int]:
    """How many tokens more than texts a step may have: few numbers, so that what steps take is soon known and they recur.

    costly  guesses take time to make, so that a single one may be the best
    """
    return [more for more in (*([1] if costly else []), SMALL, *range(7, most + 1, 8)) if more <= most]
