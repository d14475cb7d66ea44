"""How much a client may ask for."""

import json
from dataclasses import dataclass

from auraflux.errors import InputError
from auraflux.run.sampling import Sampling
from auraflux.serve.ask import Ask, Format


@dataclass(frozen=True)
class Limits:
    """Bounds on what is asked for; what lies beyond them is refused with a sentence.

    body_nbytes     of a request
    messages        of a conversation
    parts           of a message
    prompts         of one request for completions
    answers         to one prompt
    stops           strings that end a text
    biases          tokens with a logit_bias
    tools           that are offered
    grammar_nbytes  of a grammar, and of a JSON schema
    idle_s          that a stream waits for a client that reads nothing
    deadline_s      that an answer may take; None for as long as it takes
    """

    body_nbytes: int = 8 << 20
    messages: int = 4096
    parts: int = 1024
    prompts: int = 64
    answers: int = 8
    stops: int = 16
    biases: int = 1024
    tools: int = 128
    grammar_nbytes: int = 64 << 10
    idle_s: float = 60.0
    deadline_s: float | None = None

    def check(self, ask: Ask) -> None:
        """Refuse a conversation that asks for too much."""
        at_most("messages", len(ask.messages), self.messages)
        at_most("tools", len(ask.tools), self.tools)
        self.check_sampling(ask.sampling, ask.format, ask.count)

    def check_sampling(self, sampling: Sampling, format: Format | None, count: int) -> None:
        """Refuse settings that ask for too much."""
        at_most("n", count, self.answers)
        at_most("stop", len(sampling.stop), self.stops)
        at_most("logit_bias", len(sampling.logit_bias), self.biases)
        if format is not None and format.source is not None:
            source = format.source if isinstance(format.source, str) else json.dumps(format.source)
            at_most("the bytes of the grammar or schema", len(source.encode()), self.grammar_nbytes)


def at_most(name: str, found: int, most: int) -> None:
    if found > most:
        raise InputError(f"This server takes at most {most} for {name}, not {found}.")
