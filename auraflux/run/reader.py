"""Prompts that are read: which pieces of them are next, what goes through the model together, and what is kept of it."""

from torch import Tensor

from auraflux.cache.prefix import PrefixStore
from auraflux.run.engine import Engine
from auraflux.run.job import Job
from auraflux.run.pace import Pace
from auraflux.run.speculate import Speculation

Piece = tuple[Job, int]  # whose prompt, and how many of its next tokens


class Reader:
    """Takes pieces of prompts in.

    speculation  makes guesses; None for none
    """

    def __init__(self, engine: Engine, prefixes: PrefixStore):
        self.engine, self.prefixes = engine, prefixes
        self.speculation: Speculation | None = None
        self.pace = Pace(engine.chunk, engine.device.type)

    def next(self, running: list[Job], beside_writing: bool) -> list[list[Piece]]:
        """The pieces to read next; those of a list go through the model together."""
        reading = [job for job in running if job.unread > 0]
        if not reading:
            return []
        writing = len(running) - len(reading) if beside_writing else 0
        budget = self.pace.budget(sum(job.unread for job in reading), len(reading), writing)
        one = self.speculation is None and bool(self.engine.sizes_beside(writing))
        shares = self.pace.shares([job.piece for job in reading], budget, one)
        chosen = [(job, share) for job, share in zip(reading, shares, strict=True) if share]
        return [[each] for each in chosen] if self.engine.sooner_apart(sum(shares)) else [chosen]

    def goes_beside(self, chosen: list[Piece], running: list[Job]) -> bool:
        """Whether this goes through the model with the next step of writing."""
        if self.speculation is not None or len(chosen) > 1:
            return False
        writing = sum(job.unread <= 0 for job in running)
        return all(self.engine.fit_beside(writing, share, share < job.piece) for job, share in chosen)

    def comes_to_ends(self, chosen: list[Piece], running: list[Job]) -> bool:
        """Whether last tokens are read with the others: all these prompts come to their ends, and nobody else writes."""
        tokens = sum(share + 1 for _, share in chosen)
        fits = tokens <= self.engine.chunk and not self.engine.sooner_apart(tokens)
        alone = self.speculation is None and all(job.unread for job in running)
        return self.engine.reads_ends(len(chosen)) and fits and alone and all(job.unread == share for job, share in chosen)

    def read(self, chosen: list[Piece]) -> None:
        """Take pieces in."""
        jobs, starts = [job for job, _ in chosen], [job.held.length for job, _ in chosen]
        pieces = [job.ids[at : at + share] for (job, share), at in zip(chosen, starts, strict=True)]
        with self.pace.measured(sum(share for _, share in chosen)):
            hidden = self.engine.read([job.held for job in jobs], pieces)
            if self.speculation is not None and self.engine.keeps_hidden:
                rows = hidden.split([share for _, share in chosen])
                self.speculation.hear(list(zip(jobs, starts, rows, strict=True)))
        for job in jobs:
            self.note(job)

    def read_to_ends(self, jobs: list[Job]) -> Tensor:
        """Take in all that is left of prompts, their last tokens too: the scores of what follows, [B, V]."""
        scores = self.engine.read_ends([job.held for job in jobs], [job.ids[job.held.length :] for job in jobs])
        for job in jobs:
            self.note(job, ends=True)
        return scores

    def note(self, job: Job, ends: bool = False) -> None:
        """Keep what others may begin with of a prompt that has been read further, or to its end."""
        if job.held.length - ends in job.marks:
            job.held.checkpoint(before=int(ends))
        if job.unread <= 0 and job.kept is None:
            job.kept = self.prefixes.note(job.ids[:-1], job.held)
