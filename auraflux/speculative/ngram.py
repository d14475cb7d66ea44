"""Draft tokens from the sequence so far (prompt lookup): those that followed an earlier occurrence of its last tokens."""

from auraflux.cache import KVSequence

BIGRAM = 2  # tokens by which occurrences are looked up
CANDIDATES = 16  # most recent occurrences that are compared
MAX_MATCH = 32  # tokens that are compared
# matching tokens from which on a draft is of the next kind: longer matches are accepted more often
KINDS = (4, 8)
COPIED = len(KINDS) + 1  # kind of drafts that resume an earlier long match after an edit
MAX_SHIFT, MAX_GAP = 16, 32  # tokens that the edit may insert or delete, and within which the match resumes


class NGramProposer:
    """Draft tokens for one sequence, which only grows.

    free   True: a lookup costs next to nothing
    kind   of the last draft, by the length of its match
    """

    free = True

    def __init__(self) -> None:
        self.kind = 0
        # positions after each bigram
        self._positions: dict[tuple[int, int], list[int]] = {}
        self._indexed = BIGRAM
        # of the last long match: the distance back to it, and the sequence's length then
        self._copying: tuple[int, int] | None = None

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Return up to `count` draft tokens: the continuation of the longest earlier match of the sequence's end."""
        self._index(tokens)
        if len(tokens) < BIGRAM:
            return []
        positions = self._positions.get((tokens[-2], tokens[-1]), [])[-CANDIDATES:]
        if not positions:
            return []
        # ties go to the most recent; a copy in progress goes before longer short matches
        end = len(tokens)
        long, resumes, length, position = max(self._rank(tokens, position) for position in positions)
        self.kind = COPIED if resumes and not long else sum(length >= least for least in KINDS)
        if long:
            self._copying = end - position, end
        draft = tokens[position : position + count]
        # a match that reaches the end of the sequence is periodic: continue with the draft itself
        for at in range(len(draft), count):
            draft.append(draft[at - (len(tokens) - position)])
        return draft

    def _rank(self, tokens: list[int], position: int) -> tuple[bool, bool, int, int]:
        """Return whether the match is long, whether it resumes a copy, its length and its position."""
        length, end = _match_length(tokens, position), len(tokens)
        resumes = False
        if self._copying is not None:
            distance, since = self._copying
            resumes = end - since <= MAX_GAP and abs(end - position - distance) <= MAX_SHIFT
        return length >= KINDS[-1], resumes, length, position

    def on_prefix_hit(self, tokens: list[int], kv_sequence: KVSequence) -> None:
        """Do nothing: all tokens are indexed when draft tokens are requested."""

    def close(self, tokens: list[int] | None = None) -> None:
        """Do nothing: there is no state elsewhere."""

    def _index(self, tokens: list[int]) -> None:
        for position in range(self._indexed, len(tokens)):
            self._positions.setdefault((tokens[position - 2], tokens[position - 1]), []).append(position)
        self._indexed = max(self._indexed, len(tokens))


def _match_length(tokens: list[int], position: int) -> int:
    """Return how many tokens before a position equal those at the end of the sequence."""
    end, limit = len(tokens), min(position, MAX_MATCH)
    length = BIGRAM
    while length < limit and tokens[position - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length
