"""A model that writes what it is told to, for tests of what stands before it; and a server that answers with it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from auraflux.errors import BusyError, SettingsError
from auraflux.run.request import Event, Figures, Request, Scored
from auraflux.run.tokenizer import Tokenizer
from auraflux.serve.link import Gauges, ModelFacts
from auraflux.weights.placement import Dealt
from tests.run.toy_tokenizers import byte_level

NAME = "toy/model"
# as many models have it: tools in the first message, and no system message but the first
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
each call within <tool_call></tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>
{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments":
{{- ' ' ~ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if reasoning_effort %}<!-- {{ reasoning_effort }} -->{% endif %}{% endif %}"""


@dataclass(frozen=True)
class Script:
    """What is written for a request.

    pieces   the text, an event each
    finish   why it ends; None stalls until it is cancelled
    error    with finish "error"
    """

    pieces: tuple[str, ...] = ("Hello", " there", "!")
    finish: str | None = "stop"
    error: str | None = None
    stop: str | None = None


def make_tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(), names={"eos_token": "<|im_end|>"}, ends=[2], templates={"default": TEMPLATE})


class FakeLink:
    """Writes `scripts` one after the other, the last again and again, and keeps what was asked.

    room   requests that are taken before the queue is full; None for any number
    """

    def __init__(self, *scripts: Script | str, ready: bool = True, context: int = 4096):
        self.tokenizer: Tokenizer | None = make_tokenizer()
        known = self.tokenizer.vocab_size
        self._facts = ModelFacts(NAME, "qwen3", context, known, frozenset({2}), "k8v4", "cpu", 4)
        self.facts: ModelFacts | None = self._facts if ready else None
        self.why_not = "The model is being loaded; try again soon."
        self.gauges = Gauges(1, 2, 3, 12, 100, 40, 5, 6, 7, 8, 20, 15)
        self.requests: list[Request] = []
        self.writings: list[FakeWriting] = []
        self.room: int | None = None
        self.scripts: list[Script] = []
        self.write(*scripts or ("Hello there!",))

    def write(self, *scripts: Script | str) -> None:
        """Say what is written from now on; a text is cut into words."""
        self.scripts = [Script(_words(each)) if isinstance(each, str) else each for each in scripts]

    def load(self) -> None:
        self.facts = self._facts

    async def deal_experts(self) -> Dealt:
        raise SettingsError("one process has all experts: there are no ranks to deal them out to.")

    def submit(self, request: Request) -> "FakeWriting":
        if self.room is not None and len(self.requests) >= self.room:
            raise BusyError("64 requests wait already; try again later.")
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.requests.append(request)
        assert self.tokenizer is not None
        self.writings.append(FakeWriting(request, script, self.tokenizer))
        return self.writings[-1]

    @property
    def prompt(self) -> str:
        """The text of the last prompt."""
        assert self.tokenizer is not None
        return self.tokenizer.decode(self.requests[-1].prompt, special=True)


class FakeWriting:
    """A text that comes word by word.

    cancelled  set when somebody stops it
    """

    def __init__(self, request: Request, script: Script, tokenizer: Tokenizer):
        self._request, self._script, self._tokenizer = request, script, tokenizer
        self.cancelled = False
        self.events = 0
        self._stop = asyncio.Event()

    def cancel(self) -> None:
        self.cancelled = True
        self._stop.set()

    async def __aiter__(self) -> AsyncIterator[Event]:
        count = 0
        for piece in self._script.pieces:
            # lets others go on, as waiting for a model would
            await asyncio.sleep(0)
            if self.cancelled:
                break
            tokens = tuple(self._tokenizer.encode(piece, special=False))
            count += len(tokens)
            self.events += 1
            yield Event(piece, tokens, self._scored(tokens))
        if self._script.finish is None:
            await self._stop.wait()
        finish = "cancelled" if self.cancelled else self._script.finish
        ended = (2,) if finish == "stop" else ()
        figures = Figures(len(self._request.prompt), 3, count + len(ended), 0.25, 0.5, 2.5, 1000, 4000)
        yield Event("", ended, self._scored(ended), finish, self._script.stop, self._script.error, figures)

    def _scored(self, tokens: tuple[int, ...]) -> tuple[Scored, ...]:
        wanted = self._request.sampling.logprobs
        if wanted is None:
            return ()
        return tuple(Scored(token, -0.5, tuple((other, -float(other)) for other in range(5, 5 + wanted))) for token in tokens)


def _words(text: str) -> tuple[str, ...]:
    first, *rest = text.split(" ")
    return (first, *(f" {word}" for word in rest))


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Serve on a free port of this machine, and give the address."""
    config = uvicorn.Config(app, "127.0.0.1", 0, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    begun = threading.Event()

    async def run() -> None:
        serve = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
        begun.set()
        await serve

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert begun.wait(10)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
