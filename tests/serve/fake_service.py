"""A service that says what a script has, and a server around it."""

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from auraflux.run.request import Figures
from auraflux.serve.app import make_app
from auraflux.serve.ask import Ask
from auraflux.serve.deltas import CallArguments, CallBegin, Content, Delta, Finish, Reasoning
from auraflux.serve.failures import Failure
from auraflux.serve.guard import Access
from auraflux.serve.limits import Limits
from auraflux.serve.link import ModelFacts
from tests.serve.fake_link import serving

FACTS = ModelFacts(
    name="tiny", model_type="llama", context=4096, vocab=100, ends=frozenset({2}), kv="k8v4", device="cpu", parallel=8
)
FIGURES = Figures(prompt_tokens=20, cached_tokens=16, tokens=7)


def end(reason: str = "stop", **fields: Any) -> list[Delta]:
    return [Finish(reason, FIGURES, **fields)]


HELLO: list[list[Delta]] = [[Content("Hel")], [Content("lo, 世界\u2028\n")], end()]
THOUGHT: list[list[Delta]] = [[Reasoning("Let me ")], [Reasoning("see."), Content("4")], [Content("2")], end()]
CALLS: list[list[Delta]] = [
    [Reasoning("I look.")],
    [Content("Looking.")],
    [CallBegin(0, "call_a", "weather"), CallArguments(0, '{"city"')],
    [CallArguments(0, ': "Oslo"}')],
    [CallBegin(1, "call_b", "weather"), CallArguments(1, '{"city": "Rome"}'), *end("tool_calls")],
]


class FakeAnswer:
    """Gives its script."""

    def __init__(self, script: Sequence[Sequence[Delta]]):
        self.prompt_tokens, self.reasoning_tokens = FIGURES.prompt_tokens, 3
        self.cancelled = False
        self._script = script

    async def batches(self) -> AsyncIterator[list[Delta]]:
        for deltas in self._script:
            yield list(deltas)

    def cancel(self) -> None:
        self.cancelled = True


class FakeService:
    """Answers everything with `script`, or with `refusal`; `asked` is what it was asked."""

    def __init__(self) -> None:
        self.limits, self.facts = Limits(), FACTS
        self.script: Sequence[Sequence[Delta]] = HELLO
        self.refusal: Exception | None = None
        self.asked: list[Ask] = []

    def check_ready(self) -> None:
        pass

    def check_model(self, name: str | None) -> None:
        if name != FACTS.name:
            raise Failure(404, f"The model {name!r} is not served here. The one that is: tiny.", code="model_not_found")

    async def answer(self, ask: Ask) -> list[FakeAnswer]:
        self.asked.append(ask)
        if self.refusal is not None:
            raise self.refusal
        return [FakeAnswer(self.script)]

    async def count_tokens(self, ask: Ask) -> int:
        self.asked.append(ask)
        return 20


@contextlib.contextmanager
def served(service: FakeService, keys: tuple[str, ...] = ()) -> Iterator[str]:
    """Give the address of a server that answers for this service."""
    app = make_app(service, Access(keys=keys))  # type: ignore[arg-type]
    with serving(app) as url:
        yield url
