"""Many clients, some disconnecting and one slow, under memory pressure: the others get the output they would get alone."""

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
from auraflux.loading import memory_budget
from auraflux.serve.transport.http_process import HttpSettings
from tests.engine.tiny import tiny
from tests.models.oracles import save
from tests.models.test_graphs import MODELS, WITHOUT_GRAPHS
from tests.serve.server import Process, Served, process, running, wait_until

CONTEXT, PARALLEL = 256, 8
PAGES = 6  # of 64 tokens: too few for the running sequences
CLIENTS = 64
SMALL = 4096  # bytes of socket buffers, so that backpressure of a slow reader is immediate


@dataclass(frozen=True)
class Question:
    """Request of one client.

    leaves  chunks after which it disconnects; None reads all
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
    """Reference outputs of a model that runs one request at a time."""

    def __init__(self, path: Path):
        self._model = auraflux.load(path, "cpu", exact=True, context=CONTEXT, max_sequences=1, sampling={"temperature": 0})
        self._outputs: dict[Question, str] = {}

    def __call__(self, question: Question) -> str:
        key = replace(question, leaves=None)
        if key not in self._outputs:
            self._outputs[key] = "".join(self._model.generate(list(key.prompt), ignore_eos=True, **key.settings))
        return self._outputs[key]

    def check(self, requests: Sequence[Question], found: Sequence[str | None]) -> None:
        for question, text in zip(requests, found, strict=True):
            assert text == self(question) or (text is None and question.leaves is not None), question


def questions(count: int, longest: int, seed: int = 5) -> list[Question]:
    """Return requests of a few kinds, each several times, some with a common prefix."""
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
    return save((MODELS | WITHOUT_GRAPHS)[name](), Path(mkdtemp(prefix="auraflux-tiny-")))


async def send(client: httpx.AsyncClient, url: str, question: Question) -> str | None:
    """Return the streamed text; None for a client that disconnects."""
    chunks: list[str] = []
    if question.leaves == 0:
        return await leave_at_once(url, question)
    async with client.stream("POST", f"{url}/v1/completions", json=question.body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return "".join(chunks)
            if line.startswith("data: "):
                chunks.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
            if len(chunks) == question.leaves:
                return None
    raise AssertionError(f"a stream ended after {len(chunks)} chunks")


async def leave_at_once(url: str, question: Question) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(encode_request(question.body))
    await writer.drain()
    writer.close()
    await writer.wait_closed()


def encode_request(body: dict[str, Any]) -> bytes:
    content = json.dumps(body)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    return (head + content).encode()


async def read_slowly(url: str, question: Question, others: asyncio.Event) -> str:
    """Read one byte per second until the others are done, then the rest."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
    connection.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    reader, writer = await asyncio.open_connection(sock=connection, limit=SMALL)
    # logprobs make the response larger than the socket buffers
    writer.write(encode_request({**question.body, "logprobs": 20}))
    received = b""
    while not others.is_set():
        received += await reader.read(1)
        await asyncio.wait([asyncio.ensure_future(others.wait())], timeout=1)
    received += await reader.read()
    writer.close()
    await writer.wait_closed()
    parts = re.findall(r"^data: (\{.*)$", _dechunked(received).decode(), re.M)
    assert b"[DONE]" in received
    return "".join(json.loads(part)["choices"][0]["text"] for part in parts)


def _dechunked(raw: bytes) -> bytes:
    body, parts = raw.partition(b"\r\n\r\n")[2], []
    while body:
        size, _, body = body.partition(b"\r\n")
        parts.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return b"".join(parts)


async def send_all(url: str, requests: Sequence[Question]) -> list[str | None]:
    """Send all requests, CLIENTS at a time."""
    slots = asyncio.Semaphore(CLIENTS)
    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:

        async def one(question: Question) -> str | None:
            async with slots:
                return await send(client, url, question)

        return await asyncio.gather(*map(one, requests))


def nothing_leaks(served: Served) -> None:
    wait_until(lambda: served.scheduler.idle)
    served.model.reset()
    held = served.model.engine.cache
    assert held.nbytes == 0
    assert all(group.pool.free == group.pool.count for group in held.page_groups)
    assert not list(held.checkpoints)
    wait_until(lambda: not served.process._sequences)


@pytest.mark.parametrize("name", ["text", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS | WITHOUT_GRAPHS)])
def test_disconnecting_and_slow_clients(name: str, monkeypatch: pytest.MonkeyPatch):
    requests, slow = questions(CLIENTS, longest=140), Question((7, 8, 9), 150, 1.0, 99)
    left = sum(question.leaves is not None for question in requests)
    assert CLIENTS / 5 < left < CLIENTS / 2
    monkeypatch.setattr(memory_budget, "pool_tokens", lambda *shapes, **options: PAGES * 64)
    options: dict[str, Any] = {"path": folder(name), "context": CONTEXT, "max_sequences": PARALLEL}

    async def together() -> tuple[list[str | None], str]:
        others = asyncio.Event()
        reading = asyncio.ensure_future(read_slowly(served.url, slow, others))
        try:
            found = await send_all(served.url, requests)
        finally:
            others.set()
            text = await reading
        return found, text

    with running(buffer_nbytes=SMALL, settings=HttpSettings(waiting=CLIENTS + 1, grace_s=0.5), **options) as served:
        found, text = asyncio.run(together())
        assert served.scheduler.counts.preemptions > 0
        nothing_leaks(served)
    alone = Alone(folder(name))
    alone.check(requests, found)
    assert text == alone(slow)


@pytest.mark.slow
def test_memory_is_flat():
    cache = auraflux.load(tiny(), "cpu", exact=True, context=CONTEXT, max_sequences=PARALLEL).engine.cache
    nbytes = cache.reserved_nbytes + PAGES * cache.page_nbytes
    options = ("--exact", "--context", str(CONTEXT), "--max-sequences", str(PARALLEL), "--cache-memory", str(nbytes))
    requests, alone = questions(2000, longest=140), Alone(tiny())
    with process(*options) as served:
        served.ready()
        halves, sizes = (requests[:1000], requests[1000:]), []
        for half in halves:
            alone.check(half, asyncio.run(send_all(served.url, half)))
            sizes.append(resident(served))
        for before, after in zip(*sizes, strict=True):
            assert after - before < 6 << 20, sizes
        metrics = httpx.get(f"{served.url}/metrics").text
        assert float(re.findall(r"^auraflux:num_preemptions_total\S* (\S+)$", metrics, re.M)[0]) > 0
        wait_until(lambda: re.search(r"^auraflux:kv_cache_usage_perc\S* 0\.0$", httpx.get(f"{served.url}/metrics").text, re.M))


def resident(served: Process) -> list[int]:
    """Return the resident bytes of the model process and of the HTTP process."""
    found = []
    for number in (served.popen.pid, served.http):
        status = Path(f"/proc/{number}/status").read_text()
        found.append(int(re.findall(r"^VmRSS:\s+(\d+) kB", status, re.M)[0]) << 10)
    return found
