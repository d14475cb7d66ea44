"""A request while it is carried out."""

import time
from collections.abc import Callable
from concurrent.futures import Future

from auraflux.cache import Sequence, Snapshot
from auraflux.cache.prefix import Kept
from auraflux.run.request import Event, Figures, Request, Scored
from auraflux.run.speculate import Guesses
from auraflux.run.stream import Stream


class Job:
    """What has become of a request.

    ids        all tokens that are known: the prompt, and those chosen
    sequence   what the cache holds of them; None while it waits. It is ready to write when all but the last are there
    kept       lets others branch from it
    marks      lengths at which a checkpoint is wanted, ascending
    cached     tokens of the prompt that the cache had when it was begun first
    looked     whether the disk was asked for more of them
    fetching   what is being read from there
    cancelled  nobody wants it any more
    failure    what ended it
    guesses    at what comes next; None where none are made
    steps      in which its tokens were chosen
    fallback   length of a checkpoint made for a step of guesses; None for none
    """

    def __init__(self, request: Request, stream: Stream, tell: Callable[[Event], None], marks: list[int]):
        self.request, self.stream, self.tell, self.marks = request, stream, tell, marks
        self.ids = list(request.prompt)
        self.sequence: Sequence | None = None
        self.kept: Kept | None = None
        self.cached: int | None = None
        self.looked = False
        self.fetching: Future[Snapshot | None] | None = None
        self.cancelled = False
        self.failure: BaseException | None = None
        self.guesses: Guesses | None = None
        self.steps = 0
        self.fallback: int | None = None
        self.asked_at = time.perf_counter()
        self.begun_at = self.first_at = 0.0
        self.finish: str | None = None

    @property
    def held(self) -> Sequence:
        assert self.sequence is not None, "the job waits"
        return self.sequence

    @property
    def unread(self) -> int:
        """Tokens to read before it can write."""
        return len(self.ids) - 1 - self.held.length

    @property
    def piece(self) -> int:
        """Of them, how many may be read at once: up to where a checkpoint is wanted."""
        at = self.held.length
        mark = next((mark for mark in self.marks if mark > at), len(self.ids))
        return min(self.unread, mark - at)

    @property
    def room(self) -> int:
        """Tokens that may follow the next."""
        return self.stream.limit - len(self.stream.tokens) - 1

    def take(self, token: int, scored: Scored | None) -> None:
        """Add a token that was chosen, and tell of it unless it ends the text."""
        if not self.stream.tokens and not self.first_at:
            self.first_at = time.perf_counter()
        text = self.stream.take(token)
        self.ids.append(token)
        told = () if scored is None else (scored,)
        if self.stream.finish is None:
            self.tell(Event(text, (token,), told))
        else:
            self.end(self.stream.finish, text, (token,), told)

    def end(self, finish: str, text: str = "", tokens: tuple[int, ...] = (), scored: tuple[Scored, ...] = ()) -> None:
        """Tell that nothing more will come."""
        self.finish = finish
        error = None if self.failure is None else str(self.failure)
        self.tell(Event(text, tokens, scored, finish, self.stream.stop, error, self._figures()))

    def _figures(self) -> Figures:
        now = time.perf_counter()
        sequence = self.sequence
        return Figures(
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached or 0,
            tokens=len(self.ids) - len(self.request.prompt),
            queue_s=(self.begun_at or now) - self.asked_at,
            first_s=(self.first_at or now) - self.asked_at,
            total_s=now - self.asked_at,
            cache_nbytes=0 if sequence is None else sequence.nbytes,
            kept_nbytes=0 if sequence is None else sequence.kept_nbytes,
            plain_nbytes=0 if sequence is None else sequence.plain_nbytes,
            steps=self.steps,
            drafted=0 if self.guesses is None else self.guesses.drafted,
            accepted=0 if self.guesses is None else self.guesses.accepted,
        )
