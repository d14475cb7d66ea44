"""Limits on client requests."""

import json
from dataclasses import dataclass

from auraflux.engine.sampling import Sampling
from auraflux.errors import InputError
from auraflux.serve.chat.conversation import Conversation, Format


@dataclass(frozen=True)
class Limits:
    """Limits per request; larger requests are refused.

    body_nbytes     of the HTTP body
    messages        per conversation
    parts           per message
    prompts         per completion request
    embeddings      inputs per embedding request, and documents per rerank request
    answers         per prompt (`n`)
    stops           stop strings
    biases          tokens with a logit_bias
    tools           per conversation
    grammar_nbytes  of a grammar or JSON schema
    file_nbytes     of an uploaded file
    idle_s          seconds until a stream to a client that reads nothing is closed
    deadline_s      seconds per answer; None for no limit
    image_urls      whether images are fetched from http(s) URLs
    """

    body_nbytes: int = 32 << 20
    messages: int = 4096
    parts: int = 1024
    prompts: int = 64
    embeddings: int = 2048
    answers: int = 8
    stops: int = 16
    biases: int = 1024
    tools: int = 128
    grammar_nbytes: int = 64 << 10
    file_nbytes: int = 200 << 20
    idle_s: float = 60.0
    deadline_s: float | None = None
    image_urls: bool = False

    def check(self, conversation: Conversation) -> None:
        """Refuse a conversation that exceeds a limit."""
        at_most("messages", len(conversation.messages), self.messages)
        at_most("tools", len(conversation.tools), self.tools)
        self.check_sampling(conversation.sampling, conversation.format, conversation.count)

    def check_sampling(self, sampling: Sampling, format: Format | None, count: int) -> None:
        """Refuse sampling settings that exceed a limit."""
        at_most("n", count, self.answers)
        at_most("stop", len(sampling.stop), self.stops)
        at_most("logit_bias", len(sampling.logit_bias), self.biases)
        if format is not None and format.source is not None:
            source = format.source if isinstance(format.source, str) else json.dumps(format.source)
            at_most("the bytes of the grammar or schema", len(source.encode()), self.grammar_nbytes)


def at_most(name: str, found: int, most: int) -> None:
    if found > most:
        raise InputError(f"This server takes at most {most} for {name}, not {found}.")
