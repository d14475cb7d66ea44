"""Many clients at once, of which some leave and one hardly reads, while pages run out: the others get what they would alone."""

import asyncio
import json
import random
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx
import pytest
import torch

import auraflux
from auraflux.run import fit
from auraflux.serve.front import FrontSettings
from tests.models.oracles import save
from tests.models.test_replay import MODELS, UNREPLAYED
from tests.run.tiny import tiny
from tests.serve.server import Process, Served, process, running, wait_until

CONTEXT, PARALLEL = 256, 8
PAGES = 6  # of 64 tokens: fewer than texts at once, of which most need more than one
CLIENTS = 64
SMALL = 4096  # bytes that a connection holds, so that a slow reader is felt at once


@dataclass(frozen=True)
class Question:
    """What one client asks, and how it behaves.

    leaves  after so many parts, 0 before the first; None reads all
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    leaves: int | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}

    @property
    def body(self) -> dict[str, Any]:
        return {**self.settings, "prompt": self.prompt, "stream": True, "ignore_eos": True}


class Alone:
    """A model that has nothing else to do."""

    def __init__(self, path: Path):
        self._model = auraflux.load(path, "cpu", exact=True, context=CONTEXT, sequences=1)
        self._texts: dict[Question, str] = {}

    def __call__(self, question: Question) -> str:
        asked = replace(question, leaves=None)
        if asked not in self._texts:
            self._texts[asked] = "".join(self._model.generate(list(asked.prompt), endless=True, **asked.settings))
        return self._texts[asked]

    def check(self, asked: Sequence[Question], found: Sequence[str | None]) -> None:
        for question, text in zip(asked, found, strict=True):
            assert text == self(question) or (text is None and question.leaves is not None), question


def questions(count: int, longest: int, seed: int = 5) -> list[Question]:
    """Some that begin alike and some that do not, of a few kinds, so that each kind comes several times."""
    rng, made = random.Random(seed), []
    shared = [rng.randrange(5, 90) for _ in range(70)]
    for _ in range(count):
        kind = rng.randrange(24)
        prompt = (*(shared if kind % 2 else ()), *range(10, 20 + kind))
        leaves = rng.choice([0, 1, 3, 9]) if rng.random() < 0.3 else None
        made.append(Question(prompt, 8 + kind * (longest - 8) // 23, kind % 3 / 2, kind, leaves))
    return made


@cache
def folder(name: str) -> Path:
    if name == "text":
        return tiny()
    torch.manual_seed(0)
    return save((MODELS | UNREPLAYED)[name](), Path(mkdtemp(prefix="auraflux-tiny-")))


async def ask(client: httpx.AsyncClient, url: str, question: Question) -> str | None:
    """Give the text that came; None for a client that left."""
    texts: list[str] = []
    if question.leaves == 0:
        return await leave_at_once(url, question)
    async with client.stream("POST", f"{url}/v1/completions", json=question.body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return "".join(texts)
            if line.startswith("data: "):
                texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
            if len(texts) == question.leaves:
                return None
    raise AssertionError(f"a stream ended after {len(texts)} parts")


async def leave_at_once(url: str, question: Question) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(spelled(question.body))
    await writer.drain()
    writer.close()
    await writer.wait_closed()


def spelled(body: dict[str, Any]) -> bytes:
    content = json.dumps(body)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    return (head + content).encode()


async def read_slowly(url: str, question: Question, others: asyncio.Event) -> str:
    """Read a byte a second until the others are done, then the rest."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
    connection.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    reader, writer = await asyncio.open_connection(sock=connection, limit=SMALL)
    # with probabilities it is more than the connection holds
    writer.write(spelled({**question.body, "logprobs": 20}))
    came = b""
    while not others.is_set():
        came += await reader.read(1)
        await asyncio.wait([asyncio.ensure_future(others.wait())], timeout=1)
    came += await reader.read()
    writer.close()
    await writer.wait_closed()
    parts = re.findall(r"^data: (\{.*)$", _dechunked(came).decode(), re.M)
    assert b"[DONE]" in came
    return "".join(json.loads(part)["choices"][0]["text"] for part in parts)


def _dechunked(raw: bytes) -> bytes:
    body, parts = raw.partition(b"\r\n\r\n")[2], []
    while body:
        size, _, body = body.partition(b"\r\n")
        parts.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return b"".join(parts)


async def ask_all(url: str, asked: Sequence[Question]) -> list[str | None]:
    """Ask as many at once as there are clients."""
    places = asyncio.Semaphore(CLIENTS)
    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:

        async def one(question: Question) -> str | None:
            async with places:
                return await ask(client, url, question)

        return await asyncio.gather(*map(one, asked))


def nothing_leaks(served: Served) -> None:
    wait_until(lambda: served.scheduler.idle)
    served.model.reset()
    held = served.model.engine.cache
    assert held.nbytes == 0
    assert all(group.pool.free == group.pool.count for group in held.page_groups)
    assert not list(held.checkpoints)
    wait_until(lambda: not served.desk._jobs)


@pytest.mark.parametrize("name", ["text", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS | UNREPLAYED)])
def test_clients_that_leave_and_one_that_hardly_reads(name: str, monkeypatch: pytest.MonkeyPatch):
    asked, slow = questions(CLIENTS, longest=140), Question((7, 8, 9), 150, 1.0, 99)
    left = sum(question.leaves is not None for question in asked)
    assert CLIENTS / 5 < left < CLIENTS / 2
    monkeypatch.setattr(fit, "pool_tokens", lambda *shapes, **options: PAGES * 64)
    options: dict[str, Any] = {"path": folder(name), "context": CONTEXT, "sequences": PARALLEL}

    async def together() -> tuple[list[str | None], str]:
        others = asyncio.Event()
        reading = asyncio.ensure_future(read_slowly(served.url, slow, others))
        try:
            found = await ask_all(served.url, asked)
        finally:
            others.set()
            text = await reading
        return found, text

    with running(buffer_nbytes=SMALL, settings=FrontSettings(waiting=CLIENTS + 1, grace_s=0.5), **options) as served:
        found, text = asyncio.run(together())
        assert served.scheduler.counts.preemptions > 0
        nothing_leaks(served)
    alone = Alone(folder(name))
    alone.check(asked, found)
    assert text == alone(slow)


@pytest.mark.slow
def test_memory_is_flat():
    cache = auraflux.load(tiny(), "cpu", exact=True, context=CONTEXT, sequences=PARALLEL).engine.cache
    nbytes = cache.reserved_nbytes + PAGES * cache.page_nbytes
    options = ("--exact", "--context", str(CONTEXT), "--parallel", str(PARALLEL), "--cache-memory", str(nbytes))
    asked, alone = questions(2000, longest=140), Alone(tiny())
    with process(*options) as served:
        served.ready()
        halves, sizes = (asked[:1000], asked[1000:]), []
        for half in halves:
            alone.check(half, asyncio.run(ask_all(served.url, half)))
            sizes.append(resident(served))
        for before, after in zip(*sizes, strict=True):
            assert after - before < 6 << 20, sizes
        metrics = httpx.get(f"{served.url}/metrics").text
        assert float(re.findall(r"^auraflux:num_preemptions_total\S* (\S+)$", metrics, re.M)[0]) > 0
        wait_until(lambda: re.search(r"^auraflux:kv_cache_usage_perc\S* 0\.0$", httpx.get(f"{served.url}/metrics").text, re.M))


def resident(served: Process) -> list[int]:
    """Bytes of memory of the model's process and of the one that answers."""
    found = []
    for number in (served.popen.pid, served.http):
        status = Path(f"/proc/{number}/status").read_text()
        found.append(int(re.findall(r"^VmRSS:\s+(\d+) kB", status, re.M)[0]) << 10)
    return found
