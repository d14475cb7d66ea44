"""A fake link that plays scripts instead of running a model, and a server around an application."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import uvicorn
from starlette.types import ASGIApp

from auraflux.engine.request import Output, Request, RequestStats, TokenLogprob
from auraflux.engine.sampling import DefaultSampling
from auraflux.errors import BusyError, SettingsError
from auraflux.serve.transport.link import Gauges, ModelFacts
from auraflux.tokenizer.tokenizer import Tokenizer
from auraflux.weights.formats.embedding import Embedding
from auraflux.weights.parallel.expert_placement import PlacementResult
from tests.tokenizer.toy_tokenizers import byte_level

NAME = "toy/model"
DEFAULTS = DefaultSampling(temperature=0.2, top_k=9, source="test")
# like many models' templates: tools in the first message, and a system message only first
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
    """Outputs for one request.

    chunks   the text, one output each
    finish   finish reason; None stalls until it is cancelled
    error    with finish "error"
    """

    chunks: tuple[str, ...] = ("Hello", " there", "!")
    finish: str | None = "stop"
    error: str | None = None
    stop: str | None = None


def make_tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(), names={"eos_token": "<|im_end|>"}, ends=[2], templates={"default": TEMPLATE})


class FakeLink:
    """Plays `scripts` one per request, repeating the last, and records the requests.

    embeds  whether it is an embedding model
    room   requests accepted before the queue is full; None for no limit
    """

    def __init__(self, *scripts: Script | str, ready: bool = True, context: int = 4096, embeds: bool = False):
        self.tokenizer: Tokenizer | None = make_tokenizer()
        vocab = self.tokenizer.vocab_size
        self._facts = ModelFacts(NAME, "qwen3", context, vocab, frozenset({2}), "k8v4", "cpu", 4, DEFAULTS)
        self.facts: ModelFacts | None = self._facts if ready else None
        self.unavailable_reason = "The model is being loaded; try again soon."
        if embeds:
            self.facts = replace(self._facts, embedding=Embedding(prompts={"query": "find: "}))
        self.gauges = Gauges(1, 2, 3, 12, 100, 40, 5, 6, 7, 8, 20, 15)
        self.requests: list[Request] = []
        self.streams: list[FakeOutputStream] = []
        self.room: int | None = None
        self.scripts: list[Script] = []
        self.play(*scripts or ("Hello there!",))

    def play(self, *scripts: Script | str) -> None:
        """Set the scripts from now on; a string is split into words."""
        self.scripts = [Script(_words(each)) if isinstance(each, str) else each for each in scripts]

    def load(self) -> None:
        self.facts = self._facts

    async def place_experts(self) -> PlacementResult:
        raise SettingsError("the model runs in one process: there are no ranks to place experts on.")

    def submit(self, request: Request) -> "FakeOutputStream":
        if self.room is not None and len(self.requests) >= self.room:
            raise BusyError("64 requests wait already; try again later.")
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.requests.append(request)
        assert self.tokenizer is not None
        self.streams.append(FakeOutputStream(request, script, self.tokenizer))
        return self.streams[-1]

    @property
    def prompt(self) -> str:
        """Text of the last prompt."""
        assert self.tokenizer is not None
        return self.tokenizer.decode(self.requests[-1].prompt, special=True)


class FakeOutputStream:
    """Outputs of one script.

    cancelled  whether it was cancelled
    outputs    yielded so far
    """

    def __init__(self, request: Request, script: Script, tokenizer: Tokenizer):
        self._request, self._script, self._tokenizer = request, script, tokenizer
        self.cancelled = False
        self.outputs = 0
        self._stop = asyncio.Event()

    def cancel(self) -> None:
        self.cancelled = True
        self._stop.set()

    async def __aiter__(self) -> AsyncIterator[Output]:
        if self._request.pooling is not None:
            stats = RequestStats(len(self._request.prompt))
            yield Output(finish_reason="stop", stats=stats, embedding=bytes(4) * 8)
            return
        count = 0
        for chunk in self._script.chunks:
            # yields to other tasks, as waiting for a model would
            await asyncio.sleep(0)
            if self.cancelled:
                break
            tokens = tuple(self._tokenizer.encode(chunk, special=False))
            count += len(tokens)
            self.outputs += 1
            yield Output(chunk, tokens, self._logprobs(tokens), prompt_logprobs=self._scored() if self.outputs == 1 else ())
        if self._script.finish is None:
            await self._stop.wait()
        finish = "cancelled" if self.cancelled else self._script.finish
        ended = (2,) if finish == "stop" else ()
        stats = RequestStats(len(self._request.prompt), 3, count + len(ended), 0.25, 0.5, 2.5, 1000, 4000)
        yield Output("", ended, self._logprobs(ended), finish, self._script.stop, self._script.error, stats)

    def _scored(self) -> tuple[TokenLogprob, ...]:
        count, prompt = self._request.prompt_logprobs, self._request.prompt
        if count is None:
            return ()
        return tuple(
            TokenLogprob(token, -2.0, tuple((other, -1.0) for other in range(5, 5 + count)), 9) for token in prompt[1:]
        )

    def _logprobs(self, tokens: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
        count = self._request.sampling.logprobs
        if count is None:
            return ()
        return tuple(
            TokenLogprob(token, -0.5, tuple((other, -float(other)) for other in range(5, 5 + count))) for token in tokens
        )


def _words(text: str) -> tuple[str, ...]:
    first, *rest = text.split(" ")
    return (first, *(f" {word}" for word in rest))


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Serve on a free port of this machine and yield the URL."""
    config = uvicorn.Config(app, "127.0.0.1", 0, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    started = threading.Event()

    async def run() -> None:
        serve = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
        started.set()
        await serve

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
