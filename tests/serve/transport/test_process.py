"""The `auraflux serve` command: shutdown, refusals, and the death of one of its processes."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.server import Process, process, wait_until

ENDLESS = {"prompt": "hello", "max_tokens": 300, "ignore_eos": True, "stream": True}


async def read_stream(client: httpx.AsyncClient, url: str, seed: int, started: list[int]) -> list[Any]:
    """Request a long completion and return its chunks."""
    found: list[Any] = []
    async with client.stream("POST", f"{url}/v1/completions", json={**ENDLESS, "seed": seed}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                started.append(seed)
                found.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
    return found


async def stop_under_load(served: Process, number: int, everywhere: bool, clients: int = 6) -> list[list[Any]]:
    """Signal a server while it streams, and return the clients' chunks."""
    started: list[int] = []
    async with httpx.AsyncClient(timeout=60) as client:
        reading = [asyncio.ensure_future(read_stream(client, served.url, seed, started)) for seed in range(clients)]
        while len(set(started)) < clients:
            await asyncio.sleep(0.01)
        (served.signal_all if everywhere else served.signal)(number)
        return await asyncio.gather(*reading)


def finished(parts: list[Any]) -> bool:
    return parts[-1] == "[DONE]" and parts[-2]["choices"][0]["finish_reason"] == "length"


def refused(parts: list[Any]) -> bool:
    return parts[-1]["error"]["code"] == "stopped"


def test_stop_under_load_finishes_running_requests():
    with process("--grace", "60") as served:
        streams = asyncio.run(stop_under_load(served.ready(), signal.SIGTERM, everywhere=False))
        assert all(map(finished, streams))
        assert served.end() == 0, served.log


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("everywhere", [False, True], ids=["one process", "all processes"])
def test_requests_beyond_the_grace_period_get_an_error(number: int, everywhere: bool):
    with process("--grace", "0") as served:
        port = served.ready().url.rpartition(":")[2]
        streams = asyncio.run(stop_under_load(served, number, everywhere))
        assert all(finished(parts) or refused(parts) for parts in streams)
        assert any(map(refused, streams))
        assert served.end() == 0, served.log
        assert "Traceback" not in served.log
    # the port is free immediately
    with process("--port", port) as again:
        again.ready()


@pytest.mark.slow
def test_stopping_server_refuses_new_requests():
    with process("--grace", "60") as served:
        url = served.ready().url

        async def stop() -> list[list[Any]]:
            stopping = asyncio.ensure_future(stop_under_load(served, signal.SIGTERM, everywhere=False))
            while _connects(url):
                await asyncio.sleep(0.05)
            assert not stopping.done()
            return await stopping

        assert all(map(finished, asyncio.run(stop())))
        assert served.end() == 0


def _connects(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def loading() -> Iterator[Process]:
    """Run a server that accepts connections while its model loads."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with process("--port", str(port)) as served:
        wait_until(lambda: _connects(f"http://127.0.0.1:{port}"))
        yield served


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_stop_while_loading(number: int, code: int):
    with loading() as served:
        served.signal_all(number)
        assert served.end() == code, served.log
        said = [line for line in served.lines if "listening on " not in line]
        assert said == (["Interrupted.\n"] if number == signal.SIGINT else [])


def test_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with process("--port", port) as served:
            assert served.end() == 1
            assert served.log == (
                f"error: cannot listen on 127.0.0.1:{port}: Address already in use. Another --port may be free.\n"
            )


def test_public_address_requires_a_key():
    with process("--host", "0.0.0.0") as served:
        assert served.end() == 1
        assert served.log.startswith("error: --host 0.0.0.0 accepts clients of other machines. Give --api-key, for example ")
        assert served.log.endswith(", or --no-auth.\n")


@pytest.mark.slow
def test_missing_model(tmp_path: Path):
    with process(model=str(tmp_path)) as served:
        assert served.end() == 1
        # it fails before it logs that it listens
        (sentence,) = served.lines
        assert sentence.startswith("error: ")
        assert str(tmp_path) in sentence


@pytest.mark.slow
def test_model_process_dies():
    with process() as served:
        served.ready()
        wait_until(lambda: served.children)
        served.signal(signal.SIGKILL)
        # the HTTP process ends by itself
        assert served.end() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("loaded", [True, False])
def test_http_process_dies(loaded: bool):
    with process() if loaded else loading() as served:
        if loaded:
            served.ready()
        os.kill(served.http, signal.SIGKILL)
        assert served.end() == 1
        while_loading = "ended while the model was loaded; the log above says why"
        how = "exited with code -9; see the log above" if loaded else while_loading
        assert served.lines[-1] == f"error: the HTTP process {how}.\n"
