"""A fake service that plays a script of deltas, and a server around it."""

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from auraflux.engine.request import RequestStats
from auraflux.serve.app import make_app
from auraflux.serve.auth import Access
from auraflux.serve.chat.conversation import Conversation
from auraflux.serve.chat.deltas import Content, Delta, Finish, Reasoning, ToolCallArguments, ToolCallBegin
from auraflux.serve.failures import Failure
from auraflux.serve.limits import Limits
from auraflux.serve.transport.link import ModelFacts
from tests.serve.fake_link import DEFAULTS, serving

FACTS = ModelFacts(
    name="tiny",
    model_type="llama",
    context=4096,
    vocab=100,
    eos_token_ids=frozenset({2}),
    kv="k8v4",
    device="cpu",
    max_sequences=8,
)
STATS = RequestStats(prompt_tokens=20, cached_tokens=16, tokens=7)


def end(reason: str = "stop", **fields: Any) -> list[Delta]:
    return [Finish(reason, STATS, **fields)]


HELLO: list[list[Delta]] = [[Content("Hel")], [Content("lo, 世界\u2028\n")], end()]
THOUGHT: list[list[Delta]] = [[Reasoning("Let me ")], [Reasoning("see."), Content("4")], [Content("2")], end()]
CALLS: list[list[Delta]] = [
    [Reasoning("I look.")],
    [Content("Looking.")],
    [ToolCallBegin(0, "call_a", "weather"), ToolCallArguments(0, '{"city"')],
    [ToolCallArguments(0, ': "Oslo"}')],
    [ToolCallBegin(1, "call_b", "weather"), ToolCallArguments(1, '{"city": "Rome"}'), *end("tool_calls")],
]


class FakeChatOutput:
    """Yields its script."""

    def __init__(self, script: Sequence[Sequence[Delta]]):
        self.prompt_tokens, self.reasoning_tokens = STATS.prompt_tokens, 3
        self.cancelled = False
        self._script = script

    async def batches(self) -> AsyncIterator[list[Delta]]:
        for deltas in self._script:
            yield list(deltas)

    def cancel(self) -> None:
        self.cancelled = True


class FakeService:
    """Answers every request with `script`, or raises `refusal`; records the conversations."""

    def __init__(self) -> None:
        self.limits, self.prompts = Limits(), SimpleNamespace(facts=FACTS, default_sampling=DEFAULTS)
        self.script: Sequence[Sequence[Delta]] = HELLO
        self.refusal: Exception | None = None
        self.conversations: list[Conversation] = []

    def check_ready(self) -> None:
        pass

    def check_model(self, name: str | None) -> None:
        if name != FACTS.name:
            raise Failure(404, f"The model {name!r} is not served here. The served model: tiny.", code="model_not_found")

    async def select(self, request: Any, name: str | None, keep_alive: Any = None) -> "FakeService":
        self.check_model(name)
        return self

    async def chat(self, conversation: Conversation) -> list[FakeChatOutput]:
        self.conversations.append(conversation)
        if self.refusal is not None:
            raise self.refusal
        return [FakeChatOutput(self.script)]

    async def count_tokens(self, conversation: Conversation) -> int:
        self.conversations.append(conversation)
        return 20


@contextlib.contextmanager
def served(service: FakeService, keys: tuple[str, ...] = ()) -> Iterator[str]:
    """Run a server for this service and yield its URL."""
    app = make_app(service, Access(keys=keys))  # type: ignore[arg-type]
    with serving(app) as url:
        yield url
