"""Two replicas on a local Ray: prefix affinity, and retries when a replica is killed."""

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

pytest.importorskip("ray", reason="replicas need ray: pip install 'ray[serve]'")
pytestmark = pytest.mark.slow

# options that match the in-process server
OPTIONS = ("--name", NAME, "--max-sequences", "4", "--context", "512", "--exact", "--calibrate", "off")
CONVERSATIONS, MESSAGES = 6, 3
STARTED_S = 400.0  # a Ray and two models on a busy machine


def replicas() -> list[int]:
    """Return the processes of replicas, without the router."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(b"ray::ServeReplica:auraflux:Model"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def counted(served: Process, name: str) -> dict[str, float]:
    """Return a metric of every replica."""
    answer = httpx.get(f"{served.url}/metrics", timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == CONTENT_TYPE
    lines = [line for line in answer.text.splitlines() if line.startswith(f"auraflux:{name}{{")]
    return {line.partition('replica="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


def both_answer(served: Process) -> bool:
    metrics = httpx.get(f"{served.url}/metrics", timeout=30)
    return metrics.status_code == 200 and metrics.text.count("auraflux:num_requests_running{") == 2


@pytest.fixture(scope="module")
def served() -> Iterator[Process]:
    with process(*OPTIONS, "--ray", "--replicas", "2", "--grace", "10") as made:
        wait_until(lambda: is_ready(made.url) or made.popen.poll() is not None, STARTED_S)
        assert made.popen.poll() is None, made.log
        wait_until(lambda: both_answer(made), STARTED_S)
        yield made
        made.signal(signal.SIGTERM)
        assert made.popen.wait(120) == 0, made.log
        wait_until(lambda: not replicas())


def talk(url: str, number: int) -> list[int]:
    """Run a short conversation and return the cached tokens of each prompt."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{number} tell me something about the sky"}]
    found = []
    for _ in range(MESSAGES):
        request = {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/chat/completions", json=request, timeout=120)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        found.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
        messages += [body["choices"][0]["message"] | {"content": "it is blue"}, {"role": "user", "content": "and then?"}]
    return found


def test_conversation_stays_on_one_replica(served: Process):
    before = counted(served, "prefix_cache_queries_total")
    found = [talk(served.url, number) for number in range(CONVERSATIONS)]
    after = counted(served, "prefix_cache_queries_total")
    assert all(after[name] > before[name] for name in after), "one replica answered all"
    with running(calibrate="off") as one:
        alone = [talk(one.url, number) for number in range(CONVERSATIONS)]
    # the second replica prefills the shared prefix once more
    assert [tokens[1:] for tokens in found] == [tokens[1:] for tokens in alone]
    assert all(tokens[-1] > 0 for tokens in found)


def test_all_ports_are_on_loopback(served: Process):
    """Check that all listening sockets of Ray's processes are on loopback."""
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
    """Request a long answer and return how it ended."""
    body = {"messages": [{"role": "user", "content": f"{number} hello"}], "max_tokens": 150, "ignore_eos": True}
    if number % 2:
        answer = await client.post(f"{url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 150
        return "complete"
    tokens = 0
    async with client.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}) as stream:
        assert stream.status_code == 200
        async for line in stream.aiter_lines():
            if line == "data: [DONE]":
                return "complete"
            if line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    assert event["error"]["code"] == "replica_gone"
                    assert tokens > 0, "nothing had been sent, so another replica could have answered"
                    return "error"
                tokens += "content" in event["choices"][0]["delta"] and event["choices"][0]["delta"].get("role") is None
    raise AssertionError("a stream ended without its end")


def test_killed_replica_requests_are_retried(served: Process):
    async def run() -> list[str]:
        async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=40)) as client:
            pending = [asyncio.ensure_future(ask(client, served.url, number)) for number in range(24)]
            await asyncio.sleep(1.0)
            os.kill(replicas()[0], signal.SIGKILL)
            return await asyncio.gather(*pending)

    wait_until(lambda: both_answer(served), STARTED_S)
    ended = asyncio.run(run())
    assert set(ended) <= {"complete", "error"}
    assert "a replica was lost" in served.log
    # another replica replaces it
    wait_until(lambda: both_answer(served), STARTED_S)


def test_replica_with_a_dead_model_is_replaced(served: Process):
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


def test_invalid_requests_are_refused(served: Process):
    url = served.url
    assert httpx.post(f"{url}/v1/chat/completions", content=b"{").json()["error"]["code"] == "invalid_json"
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "model": "other"}).status_code == 404
    assert httpx.get(f"{url}/nothing").status_code == 404
    assert httpx.get(f"{url}/health").json() == {"status": "alive"}
    assert httpx.get(f"{url}/v1/models", headers={"host": "evil.example.org"}).status_code == 403
    assert httpx.post(f"{url}/v1/completions", content=b" " * (9 << 20)).status_code == 413
