"""A server whose model is divided among ranks: it answers, and when a rank is gone it says so, and comes back."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.server import Process, is_ready, process, wait_until

OPTIONS = ("--parallel", "pipeline=2", "--parallel", "4", "--rank-timeout", "2", "--restart", "--calibrate", "off")
ASKED = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
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
