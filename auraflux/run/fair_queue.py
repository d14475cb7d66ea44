"""Requests that wait: users take turns, whoever asks for how much."""

from collections import deque
from collections.abc import Iterator

from auraflux.errors import BusyError
from auraflux.run.job import Job


class FairQueue:
    """Jobs of users, each user's in the order they came.

    limit  most jobs that wait; None for any number
    """

    def __init__(self, limit: int | None = None):
        self.limit = limit
        self._lines: dict[str, deque[Job]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def add(self, job: Job) -> None:
        if self.limit is not None and len(self) >= self.limit:
            raise BusyError(f"{len(self)} requests are waiting already, as many as may. Try again later.")
        self._lines.setdefault(job.request.user, deque()).append(job)

    def put_back(self, job: Job) -> None:
        """Let a job that was begun wait again, before all others of its user."""
        self._lines.setdefault(job.request.user, deque()).appendleft(job)
        # and its user before all others
        self._lines = {job.request.user: self._lines.pop(job.request.user), **self._lines}

    def in_turn(self) -> Iterator[Job]:
        """All jobs in the order in which they would be taken."""
        lines = [list(line) for line in self._lines.values()]
        for place in range(max(map(len, lines), default=0)):
            yield from (line[place] for line in lines if place < len(line))

    def take(self, job: Job) -> None:
        """Take a job out; its user's next comes after those of the others."""
        line = self._lines.pop(job.request.user)
        line.remove(job)
        if line:
            self._lines[job.request.user] = line
