"""A server with a model on several ranks: a lost rank fails its requests, and the server recovers."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.tiny import tiny
from tests.serve.server import Process, is_ready, process, wait_until

OPTIONS = ("--parallel", "pipeline=2", "--max-sequences", "4", "--rank-timeout", "2", "--restart", "--calibrate", "off")
REQUEST = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
ALL = 200  # requests


def follower(served: Process) -> int:
    """Return the process id of the other rank."""
    for entry in Path("/proc").iterdir():
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            if entry.name.isdigit() and int(parent) == served.popen.pid and "follow" in (entry / "cmdline").read_text():
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError("there is no follower")


def complete(served: Process) -> str:
    return httpx.post(f"{served.url}/v1/completions", json=REQUEST, timeout=60).json()["choices"][0]["text"]


async def complete_many(served: Process, count: int, number: int) -> list[httpx.Response]:
    """Send many requests at once, and signal the other rank while they run."""
    async with httpx.AsyncClient(timeout=60) as client:
        request: dict[str, Any] = {**REQUEST, "max_tokens": 200}
        pending = [
            asyncio.ensure_future(client.post(f"{served.url}/v1/completions", json={**request, "prompt": f"{i} hello"}))
            for i in range(count)
        ]
        await asyncio.sleep(0.3)
        os.kill(follower(served), number)
        return await asyncio.gather(*pending)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_rank_fails_requests_and_recovers(number: int):
    with process(*OPTIONS) as served:
        served.ready()
        before = complete(served)
        answers = asyncio.run(complete_many(served, 12, number))
        failed = [answer for answer in answers if answer.status_code != 200]
        assert failed, "the rank was lost before all requests finished"
        assert all("rank" in answer.json()["error"]["message"] for answer in failed)
        wait_until(lambda: "ready again" in served.log and is_ready(served.url))
        assert complete(served) == before
        assert "Traceback" not in served.log
        served.signal(signal.SIGTERM)
        assert served.end() == 0


@pytest.mark.slow
def test_lost_rank_without_restart_stays_unavailable():
    with process(*(option for option in OPTIONS if option != "--restart")) as served:
        served.ready()
        os.kill(follower(served), signal.SIGKILL)
        wait_until(lambda: not is_ready(served.url))
        refused = httpx.post(f"{served.url}/v1/completions", json=REQUEST)
        assert refused.status_code == 503
        assert "a rank is lost" in refused.json()["error"]["message"] or "rank 1" in refused.json()["error"]["message"]
        assert httpx.get(f"{served.url}/health").status_code == 200
        served.signal(signal.SIGTERM)
        assert served.end() == 0


@pytest.mark.slow
def test_expert_placement_during_requests():
    options = (
        "--parallel",
        "experts=2",
        "--max-sequences",
        "4",
        "--expert-counts",
        "off",
        "--calibrate",
        "off",
        "--api-key",
        "k",
    )
    headers = {"authorization": "Bearer k"}

    async def place_during_requests(served: Process) -> tuple[list[str], httpx.Response]:
        async with httpx.AsyncClient(timeout=60, headers=headers) as client:
            request = {**REQUEST, "max_tokens": 60}
            pending = [asyncio.ensure_future(client.post(f"{served.url}/v1/completions", json=request)) for _ in range(4)]
            await asyncio.sleep(0.3)
            placed = await client.post(f"{served.url}/v1/experts/placement", json={})
            return [answer.json()["choices"][0]["text"] for answer in await asyncio.gather(*pending)], placed

    with process(*options, model=str(tiny(mixture=True))) as served:
        served.ready()
        assert httpx.post(f"{served.url}/v1/experts/placement", json={}).status_code == 401
        # clears the counts of the server's own warm-up
        httpx.post(f"{served.url}/v1/experts/placement", json={}, headers=headers)
        nothing = httpx.post(f"{served.url}/v1/experts/placement", json={}, headers=headers)
        assert nothing.status_code == 400
        assert nothing.json()["error"]["message"].endswith("so there is no expert usage yet.")
        completions, placed = asyncio.run(place_during_requests(served))
        assert placed.status_code == 200, placed.text
        assert placed.json()["rows"] > 0
        assert 0.5 <= placed.json()["after"] <= placed.json()["before"] <= 1.0
        assert len(set(completions)) == 1
        assert asyncio.run(place_during_requests(served))[0] == completions
        served.signal(signal.SIGTERM)
        assert served.end() == 0


async def complete_with_retries(client: httpx.AsyncClient, served: Process, number: int, refusals: list[str]) -> str:
    """Retry a request until it succeeds; record the errors."""
    request = {**REQUEST, "prompt": f"{number % 10} hello", "max_tokens": 24}
    while True:
        answer = await client.post(f"{served.url}/v1/completions", json=request)
        if answer.status_code == 200:
            return answer.json()["choices"][0]["text"]
        refusals.append(answer.json()["error"]["message"])
        await asyncio.sleep(0.5)


async def inject_failures(served: Process, answered: list[int]) -> None:
    """Pause the other rank after some answers, kill it after more, and stop its successor after more."""
    for count, number in ((20, signal.SIGCONT), (70, signal.SIGKILL), (120, signal.SIGSTOP)):
        while len(answered) < count:
            await asyncio.sleep(0.01)
        assert len(answered) < ALL, "all requests finished before the failure"
        process = follower(served)
        for _ in range(6 if number == signal.SIGCONT else 0):
            os.kill(process, signal.SIGSTOP)
            await asyncio.sleep(0.3)
            os.kill(process, signal.SIGCONT)
            await asyncio.sleep(0.1)
        os.kill(process, number)
        while number != signal.SIGCONT and is_ready(served.url):
            await asyncio.sleep(0.1)
        while not is_ready(served.url):
            await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pipeline=2", "tensor=2"])
def test_requests_survive_rank_failures(layout: str):
    async def complete_all(served: Process) -> tuple[list[str], list[str]]:
        refusals: list[str] = []
        answered: list[int] = []
        pending = asyncio.Semaphore(8)

        async def one(number: int) -> str:
            async with pending:
                found = await complete_with_retries(client, served, number, refusals)
                answered.append(number)
                return found

        async with httpx.AsyncClient(timeout=60) as client:
            answers = asyncio.gather(*(one(number) for number in range(ALL)))
            await inject_failures(served, answered)
            return await answers, refusals

    with process("--parallel", layout, *OPTIONS[2:]) as served:
        served.ready()
        answers, refusals = asyncio.run(complete_all(served))
        assert len(answers) == ALL
        for number in range(10):
            assert len(set(answers[number::10])) == 1, "the same was request, and another answer came"
        assert all("rank" in refusal for refusal in refusals)
        assert served.log.count("ready again") == 2
        served.signal(signal.SIGTERM)
        assert served.end() == 0
