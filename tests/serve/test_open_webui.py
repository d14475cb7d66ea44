"""Open WebUI in front of a server, by both connections. AURAFLUX_OPEN_WEBUI names an environment with its 240 packages."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from auraflux.serve.app import make_app
from auraflux.serve.auth import Access
from auraflux.serve.service import Service
from tests.serve.fake_link import NAME, FakeLink, serving

ENVIRONMENT = os.environ.get("AURAFLUX_OPEN_WEBUI", "")
START_S = 600.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ENVIRONMENT, reason="AURAFLUX_OPEN_WEBUI names no environment with the package open-webui"),
]


@pytest.fixture
def link() -> FakeLink:
    link = FakeLink()
    link.play("Hello there!")
    return link


@pytest.fixture
def web(link: FakeLink, tmp_path: Path) -> Iterator[httpx.Client]:
    """A signed-in client of Open WebUI's own API, connected to our server as Ollama and as OpenAI."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with serving(make_app(Service(link), Access(keys=("sk",)))) as url:
        settings = {
            "DATA_DIR": str(tmp_path),
            "WEBUI_AUTH": "False",
            "WEBUI_SECRET_KEY": "x",
            "OLLAMA_BASE_URL": url,
            "OLLAMA_API_CONFIGS": '{"0": {"enable": true, "key": "sk"}}',
            "OPENAI_API_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "sk",
            "OFFLINE_MODE": "True",
            "HF_HUB_OFFLINE": "1",
            "RAG_EMBEDDING_ENGINE": "openai",
            "no_proxy": "*",
        }
        command = [f"{ENVIRONMENT}/bin/open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | settings
        with (
            (tmp_path / "log").open("w") as log,
            subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log) as process,
        ):
            try:
                with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
                    started = time.monotonic()
                    while not _healthy(client):
                        assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
                        assert time.monotonic() - started < START_S, (tmp_path / "log").read_text()[-2000:]
                        time.sleep(1)
                    token = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
                    client.headers["authorization"] = f"Bearer {token}"
                    yield client
            finally:
                process.terminate()


def _healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_chat_through_both_connections(web: httpx.Client, link: FakeLink):
    models: dict[str, Any] = {model["id"]: model["owned_by"] for model in web.get("/api/models").json()["data"]}
    assert models[f"{NAME}:latest"] == "ollama"
    assert models[NAME] == "openai"
    for name in (f"{NAME}:latest", NAME):
        body = {"model": name, "stream": False, "messages": [{"role": "user", "content": "hello"}]}
        answer = web.post("/api/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "Hello there!"
        streamed = web.post("/api/chat/completions", json={**body, "stream": True}).text
        assert "Hello" in streamed
        assert "[DONE]" in streamed
    assert web.get("/ollama/api/version").json()["version"]
