"""The queue of waiting sequences, fair between users."""

from collections import deque
from collections.abc import Iterator

from auraflux.errors import BusyError
from auraflux.scheduler.sequence import Sequence


class FairQueue:
    """Waiting sequences: round-robin between users, first come first served for each user.

    limit  maximum length; None for no limit
    """

    def __init__(self, limit: int | None = None):
        self.limit = limit
        self._queues: dict[str, deque[Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, sequence: Sequence) -> None:
        """Append a new sequence, or refuse it if the queue is full."""
        if self.limit is not None and len(self) >= self.limit:
            raise BusyError(f"{len(self)} requests are waiting already, as many as may. Try again later.")
        self._queues.setdefault(sequence.request.user, deque()).append(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Put a preempted sequence at the head of the queue."""
        user = sequence.request.user
        self._queues.setdefault(user, deque()).appendleft(sequence)
        self._queues = {user: self._queues.pop(user), **self._queues}

    def in_order(self) -> Iterator[Sequence]:
        """Iterate over all sequences in the order of admission."""
        queues = [list(queue) for queue in self._queues.values()]
        for place in range(max(map(len, queues), default=0)):
            yield from (queue[place] for queue in queues if place < len(queue))

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence; its user's next one comes after those of the other users."""
        queue = self._queues.pop(sequence.request.user)
        queue.remove(sequence)
        if queue:
            self._queues[sequence.request.user] = queue
