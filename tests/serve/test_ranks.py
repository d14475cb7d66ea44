"""A server whose model is divided among ranks: it answers, and when a rank is gone it says so, and comes back."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.run.tiny import tiny
from tests.serve.server import Process, is_ready, process, wait_until

OPTIONS = ("--parallel", "pipeline=2", "--parallel", "4", "--rank-timeout", "2", "--restart", "--calibrate", "off")
ASKED = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
ALL = 200  # requests among failures
NOTICED_S = 20.0  # at most, on a busy machine; 2 s and a moment on an idle one


def follower(served: Process) -> int:
    """The process that has the other layers."""
    for entry in Path("/proc").iterdir():
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            if entry.name.isdigit() and int(parent) == served.popen.pid and "follow" in (entry / "cmdline").read_text():
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError("there is no follower")


def ask(served: Process) -> str:
    return httpx.post(f"{served.url}/v1/completions", json=ASKED, timeout=60).json()["choices"][0]["text"]


async def ask_many(served: Process, count: int, number: int) -> list[httpx.Response]:
    """Ask many things at once, and signal the follower while they are answered."""
    async with httpx.AsyncClient(timeout=NOTICED_S) as client:
        asked: dict[str, Any] = {**ASKED, "max_tokens": 200}
        asking = [
            asyncio.ensure_future(client.post(f"{served.url}/v1/completions", json={**asked, "prompt": f"{i} hello"}))
            for i in range(count)
        ]
        await asyncio.sleep(0.3)
        os.kill(follower(served), number)
        return await asyncio.gather(*asking)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_ends_requests_and_comes_back(number: int):
    with process(*OPTIONS) as served:
        served.ready()
        before = ask(served)
        began = time.monotonic()
        answers = asyncio.run(ask_many(served, 12, number))
        assert time.monotonic() - began < NOTICED_S
        failed = [answer for answer in answers if answer.status_code != 200]
        assert failed, "the rank was gone before all was answered"
        assert all("rank" in answer.json()["error"]["message"] for answer in failed)
        wait_until(lambda: "ready again" in served.log and is_ready(served.url))
        assert ask(served) == before
        assert "Traceback" not in served.log
        served.tell(signal.SIGTERM)
        assert served.end() == 0


@pytest.mark.slow
def test_without_restart_it_stays_not_ready():
    with process(*(option for option in OPTIONS if option != "--restart")) as served:
        served.ready()
        os.kill(follower(served), signal.SIGKILL)
        wait_until(lambda: not is_ready(served.url))
        refused = httpx.post(f"{served.url}/v1/completions", json=ASKED)
        assert refused.status_code == 503
        assert "a rank is gone" in refused.json()["error"]["message"] or "rank 1" in refused.json()["error"]["message"]
        assert httpx.get(f"{served.url}/health").status_code == 200
        served.tell(signal.SIGTERM)
        assert served.end() == 0


@pytest.mark.slow
def test_experts_are_dealt_out_while_requests_are_answered():
    options = ("--parallel", "experts=2", "--parallel", "4", "--expert-use", "off", "--calibrate", "off", "--api-key", "k")
    headers = {"authorization": "Bearer k"}

    async def ask_meanwhile(served: Process) -> tuple[list[str], httpx.Response]:
        async with httpx.AsyncClient(timeout=60, headers=headers) as client:
            asked = {**ASKED, "max_tokens": 60}
            asking = [asyncio.ensure_future(client.post(f"{served.url}/v1/completions", json=asked)) for _ in range(4)]
            await asyncio.sleep(0.3)
            dealt = await client.post(f"{served.url}/v1/experts/deal", json={})
            return [answer.json()["choices"][0]["text"] for answer in await asyncio.gather(*asking)], dealt

    with process(*options, model=str(tiny(mixture=True))) as served:
        served.ready()
        assert httpx.post(f"{served.url}/v1/experts/deal", json={}).status_code == 401
        # what the server tried itself before it was ready
        httpx.post(f"{served.url}/v1/experts/deal", json={}, headers=headers)
        nothing = httpx.post(f"{served.url}/v1/experts/deal", json={}, headers=headers)
        assert nothing.status_code == 400
        assert nothing.json()["error"]["message"].endswith("there is nothing to go by yet.")
        texts, dealt = asyncio.run(ask_meanwhile(served))
        assert dealt.status_code == 200, dealt.text
        assert dealt.json()["rows"] > 0
        assert 0.5 <= dealt.json()["after"] <= dealt.json()["before"] <= 1.0
        assert len(set(texts)) == 1
        assert asyncio.run(ask_meanwhile(served))[0] == texts
        served.tell(signal.SIGTERM)
        assert served.end() == 0


async def ask_patiently(client: httpx.AsyncClient, served: Process, number: int, refusals: list[str]) -> str:
    """Ask until there is an answer; what is said meanwhile must be about ranks, and come in time."""
    asked = {**ASKED, "prompt": f"{number % 10} hello", "max_tokens": 24}
    while True:
        answer = await client.post(f"{served.url}/v1/completions", json=asked)
        if answer.status_code == 200:
            return answer.json()["choices"][0]["text"]
        refusals.append(answer.json()["error"]["message"])
        await asyncio.sleep(0.5)


async def disturb(served: Process, answered: list[int]) -> None:
    """Slow the follower down after some answers, kill it after more, and stop the next; each time there are more to come."""
    for count, number in ((20, signal.SIGCONT), (70, signal.SIGKILL), (120, signal.SIGSTOP)):
        while len(answered) < count:
            await asyncio.sleep(0.01)
        assert len(answered) < ALL, "all was answered before"
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
@pytest.mark.parametrize("way", ["pipeline=2", "tensor=2"])
def test_two_hundred_requests_among_failures(way: str):
    async def ask_all(served: Process) -> tuple[list[str], list[str]]:
        refusals: list[str] = []
        answered: list[int] = []
        asking = asyncio.Semaphore(8)

        async def one(number: int) -> str:
            async with asking:
                found = await ask_patiently(client, served, number, refusals)
                answered.append(number)
                return found

        async with httpx.AsyncClient(timeout=NOTICED_S) as client:
            answers = asyncio.gather(*(one(number) for number in range(ALL)))
            await disturb(served, answered)
            return await answers, refusals

    with process("--parallel", way, *OPTIONS[2:]) as served:
        served.ready()
        answers, refusals = asyncio.run(ask_all(served))
        assert len(answers) == ALL
        for number in range(10):
            assert len(set(answers[number::10])) == 1, "the same was asked, and another answer came"
        assert all("rank" in refusal for refusal in refusals)
        assert served.log.count("ready again") == 2
        served.tell(signal.SIGTERM)
        assert served.end() == 0
