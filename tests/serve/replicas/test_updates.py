"""Autoscaling and rolling updates of replicas."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.distributed.threaded_ranks import free_port
from tests.engine.tiny import tiny
from tests.serve.server import NAME, is_ready, wait_until

pytest.importorskip("ray", reason="replicas need ray: pip install 'ray[serve]'")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
STARTED_S = 400.0  # a Ray and two models on a busy machine
ARGS: dict[str, Any] = {"model": str(tiny()), "name": NAME, "context": 512, "calibrate": "off", "grace": 60, "device": "cpu"}


class Deployed:
    """An application on a separate Ray.

    statuses  of its replicas, one per second
    """

    def __init__(self, popen: "subprocess.Popen[str]", port: int):
        self.popen, self.port, self.statuses = popen, port, []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.popen.stdout or ():
            if line.startswith("{"):
                self.statuses.append(json.loads(line))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def deploy(self, args: dict[str, Any], **model: Any) -> None:
        config = {
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "applications": [
                {
                    "name": "auraflux",
                    "route_prefix": "/",
                    "import_path": "auraflux.cli.serve_ray:application",
                    "args": args,
                    "deployments": [{"name": "Model", **model}] if model else [],
                }
            ],
        }
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(config) + "\n")
        self.popen.stdin.flush()

    @property
    def running(self) -> int:
        """Running replicas, as of the last status."""
        return self.statuses[-1].get("Model", {}).get("RUNNING", 0) if self.statuses else 0


@contextmanager
def deployed() -> Iterator[Deployed]:
    command = [sys.executable, "-m", "tests.serve.replicas.deployed"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as popen:
        try:
            yield Deployed(popen, free_port())
            assert popen.stdin is not None
            popen.stdin.close()
            assert popen.wait(120) == 0
        finally:
            popen.kill()


def test_autoscaling():
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, "look_back_period_s": 5}
    scaling |= {"upscale_delay_s": 2, "downscale_delay_s": 5, "metrics_interval_s": 1}
    with deployed() as served:
        served.deploy({**ARGS, "parallel": 2, "replicas": "1-2"}, autoscaling_config=scaling)
        wait_until(lambda: is_ready(served.url), STARTED_S)
        wait_until(lambda: served.running == 1, STARTED_S)
        words = ["bench", "serve", NAME, "--url", served.url, "--clients", "12", "--prompt-tokens", "64", "--tokens", "200"]
        command = [sys.executable, "-m", "auraflux", *words, "--requests", "48", "--json"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as load:
            wait_until(lambda: served.running == 2 or load.poll() is not None, STARTED_S)
            assert served.running == 2, "the load ended before another replica was there"
            output, _ = load.communicate(timeout=STARTED_S)
        assert load.returncode == 0
        assert json.loads(output)
        wait_until(lambda: served.running == 1 and served.statuses[-1]["Model"] == {"RUNNING": 1}, STARTED_S)
        assert is_ready(served.url)


class Client:
    """Client that sends one request after another, every other one streamed, until it is stopped."""

    def __init__(self, url: str, number: int):
        self.url, self.number, self.answers, self.failures = url, number, 0, list[str]()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        with httpx.Client(timeout=STARTED_S) as client:
            while not self.stopped.is_set():
                try:
                    self._send(client, self.answers % 2 == 0)
                    self.answers += 1
                except (AssertionError, httpx.HTTPError) as err:
                    self.failures.append(f"{type(err).__name__}: {err}")
                    return

    def _send(self, client: httpx.Client, streamed: bool) -> None:
        messages = [{"role": "user", "content": f"{self.number} hello {self.answers}"}]
        body = {"messages": messages, "max_tokens": 60, "ignore_eos": True, "stream": streamed}
        answer = client.post(f"{self.url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        if streamed:
            assert answer.text.rstrip().endswith("data: [DONE]"), answer.text[-300:]
            assert '"error"' not in answer.text
        else:
            assert answer.json()["usage"]["completion_tokens"] == 60


def test_rolling_update_loses_no_request():
    with deployed() as served:
        served.deploy({**ARGS, "parallel": 4, "replicas": "2"})
        wait_until(lambda: is_ready(served.url) and served.running == 2, STARTED_S)
        before = _context(served.url)
        clients = [Client(served.url, number) for number in range(4)]
        time.sleep(3)
        served.deploy({**ARGS, "parallel": 4, "replicas": "2", "context": 400})
        wait_until(lambda: any(status["status"] == "DEPLOYING" for status in served.statuses[-30:]), STARTED_S)
        wait_until(lambda: served.statuses[-1]["status"] == "RUNNING" and served.running == 2, STARTED_S)
        wait_until(lambda: _context(served.url) == 400, STARTED_S)
        time.sleep(3)
        for client in clients:
            client.stopped.set()
        for client in clients:
            client.thread.join(STARTED_S)
        assert before == 512
        assert [client.failures for client in clients] == [[]] * len(clients)
        assert all(client.answers > 2 for client in clients)


def _context(url: str) -> int:
    return httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["max_model_len"]
