"""Two replicas on a Ray of this machine: conversations stay where their prefix is, and a killed replica loses nothing."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from auraflux.serve.metrics import CONTENT_TYPE
from tests.serve.server import NAME, Process, is_ready, process, running, wait_until

pytest.importorskip("ray", reason="replicas need ray: pip install 'auraflux[ray]'")
pytestmark = pytest.mark.slow

# nothing that differs between the command and a server in this process
OPTIONS = ("--name", NAME, "--parallel", "4", "--context", "512", "--exact", "--calibrate", "off")
CONVERSATIONS, TURNS = 6, 3
STARTED_S = 400.0  # a Ray and two models on a busy machine


def replicas() -> list[int]:
    """The processes of replicas, without the door."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(b"ray::ServeReplica:auraflux:Model"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def counted(served: Process, name: str) -> dict[str, float]:
    """A figure of every replica."""
    answer = httpx.get(f"{served.url}/metrics", timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == CONTENT_TYPE
    lines = [line for line in answer.text.splitlines() if line.startswith(f"auraflux:{name}{{")]
    return {line.partition('replica="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


def both_answer(served: Process) -> bool:
    figures = httpx.get(f"{served.url}/metrics", timeout=30)
    return figures.status_code == 200 and figures.text.count("auraflux:num_requests_running{") == 2


@pytest.fixture(scope="module")
def served() -> Iterator[Process]:
    with process(*OPTIONS, "--ray", "--replicas", "2", "--grace", "10") as made:
        wait_until(lambda: is_ready(made.url) or made.popen.poll() is not None, STARTED_S)
        assert made.popen.poll() is None, made.log
        wait_until(lambda: both_answer(made), STARTED_S)
        yield made
        made.tell(signal.SIGTERM)
        assert made.popen.wait(120) == 0, made.log
        wait_until(lambda: not replicas())


def talk(url: str, number: int) -> list[int]:
    """Talk for a few turns: how many tokens of each prompt were found in the cache."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{number} tell me something about the sky"}]
    found = []
    for _ in range(TURNS):
        asked = {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=120)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        found.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
        messages += [body["choices"][0]["message"] | {"content": "it is blue"}, {"role": "user", "content": "and then?"}]
    return found


def test_conversations_stay_where_their_prefix_is(served: Process):
    before = counted(served, "prefix_cache_queries_total")
    found = [talk(served.url, number) for number in range(CONVERSATIONS)]
    after = counted(served, "prefix_cache_queries_total")
    assert all(after[name] > before[name] for name in after), "one replica answered all"
    with running(calibrate="off") as one:
        alone = [talk(one.url, number) for number in range(CONVERSATIONS)]
    # a beginning that all share is found once more on the second replica
    assert [turns[1:] for turns in found] == [turns[1:] for turns in alone]
    assert all(turns[-1] > 0 for turns in found)


def test_nothing_listens_on_other_addresses(served: Process):
    """What this machine's Ray has opened is on loopback: its processes have no other listening socket."""
    ours = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _of_ray(entry)}
    sockets = {os.readlink(fd) for number in ours for fd in _files(number) if os.path.islink(fd)}
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, state, inode = (line.split()[at] for at in (1, 3, 9))
            if state == "0A" and f"socket:[{inode}]" in sockets:
                listening.append(address)
    assert listening
    loopback = ("0100007F:", "00000000000000000000000001000000:", "0000000000000000FFFF00000100007F:")
    assert [address for address in listening if not address.startswith(loopback)] == []


def _of_ray(entry: Path) -> bool:
    try:
        command = (entry / "cmdline").read_bytes()
    except OSError:
        return False
    return command.startswith(b"ray::") or b"/ray/core/src/ray/" in command or b"/ray/_private/" in command


def _files(number: int) -> list[str]:
    try:
        return [f"/proc/{number}/fd/{name}" for name in os.listdir(f"/proc/{number}/fd")]
    except OSError:
        return []


async def ask(client: httpx.AsyncClient, url: str, number: int) -> str:
    """Ask for a long answer: how it ended."""
    asked = {"messages": [{"role": "user", "content": f"{number} hello"}], "max_tokens": 150, "ignore_eos": True}
    if number % 2:
        answer = await client.post(f"{url}/v1/chat/completions", json=asked)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 150
        return "whole"
    tokens = 0
    async with client.stream("POST", f"{url}/v1/chat/completions", json={**asked, "stream": True}) as stream:
        assert stream.status_code == 200
        async for line in stream.aiter_lines():
            if line == "data: [DONE]":
                return "whole"
            if line.startswith("data: "):
                told = json.loads(line[6:])
                if "error" in told:
                    assert told["error"]["code"] == "replica_gone"
                    assert tokens > 0, "nothing had been sent, so another replica could have answered"
                    return "told"
                tokens += "content" in told["choices"][0]["delta"] and told["choices"][0]["delta"].get("role") is None
    raise AssertionError("a stream ended without its end")


def test_a_killed_replica_loses_no_request_that_was_not_begun(served: Process):
    async def run() -> list[str]:
        async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=40)) as client:
            asking = [asyncio.ensure_future(ask(client, served.url, number)) for number in range(24)]
            await asyncio.sleep(1.0)
            os.kill(replicas()[0], signal.SIGKILL)
            return await asyncio.gather(*asking)

    wait_until(lambda: both_answer(served), STARTED_S)
    ended = asyncio.run(run())
    assert set(ended) <= {"whole", "told"}
    assert "a replica is gone" in served.log
    # and another one takes its place
    wait_until(lambda: both_answer(served), STARTED_S)


def test_a_replica_whose_model_dies_is_replaced(served: Process):
    wait_until(lambda: both_answer(served), STARTED_S)
    parent = replicas()[0]
    models = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _parent(entry) == parent]
    spawned = [number for number in models if b"spawn_main" in Path(f"/proc/{number}/cmdline").read_bytes()]
    assert spawned
    os.kill(spawned[0], signal.SIGKILL)
    wait_until(lambda: parent not in replicas(), STARTED_S)
    assert talk(served.url, 99)
    wait_until(lambda: both_answer(served), STARTED_S)


def _parent(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def test_what_is_asked_wrongly_is_refused_as_one_server_does(served: Process):
    url = served.url
    assert httpx.post(f"{url}/v1/chat/completions", content=b"{").json()["error"]["code"] == "invalid_json"
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "model": "other"}).status_code == 404
    assert httpx.get(f"{url}/nothing").status_code == 404
    assert httpx.get(f"{url}/health").json() == {"status": "alive"}
    assert httpx.get(f"{url}/v1/models", headers={"host": "evil.example.org"}).status_code == 403
    assert httpx.post(f"{url}/v1/completions", content=b" " * (9 << 20)).status_code == 413
