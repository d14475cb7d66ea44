"""Ollama's published clients over a real connection: the Python package, and the JavaScript one where npm has it."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from auraflux.serve.app import make_app
from auraflux.serve.auth import Access
from auraflux.serve.service import Service
from auraflux.weights.download.pull import locate
from tests.serve.fake_link import NAME, FakeLink, Script, serving
from tests.serve.server import running

ollama = pytest.importorskip("ollama", reason="ollama's Python client is not installed")

HELLO = [{"role": "user", "content": "hello"}]
THOUGHT = "<think> They ask. </think> It is sunny."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bonn", "days": 2}}\n</tool_call>'


class Trip(BaseModel):
    """A journey."""

    place: str
    days: int


def weather(place: str, days: int) -> str:
    """Return the weather of a place.

    Args:
      place: the place
      days: how many days
    """
    return f"{days} days of rain in {place}"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeLink, str]]:
    link = FakeLink()
    with serving(make_app(Service(link), Access(keys=("sk",)))) as url:
        yield link, url


@pytest.fixture
def link(served: tuple[FakeLink, str]) -> FakeLink:
    link = served[0]
    link.requests.clear()
    link.play("Hello there!")
    return link


@pytest.fixture
def client(served: tuple[FakeLink, str], link: FakeLink) -> Iterator[Any]:
    client = ollama.Client(served[1], headers={"Authorization": "Bearer sk"})
    yield client
    client._client.close()


def test_chat(client: Any):
    answer = client.chat(NAME, HELLO, options={"temperature": 0}, keep_alive="10m")
    assert answer.message.content == "Hello there!"
    assert (answer.done, answer.done_reason, answer.eval_count) == (True, "stop", 9)
    parts = list(client.chat(NAME, HELLO, stream=True))
    assert "".join(part.message.content for part in parts) == "Hello there!"
    assert [part.done for part in parts] == [False, False, True]


def test_generate(client: Any, link: FakeLink):
    assert client.generate(NAME, "Why?", system="Be kind.").response == "Hello there!"
    assert "".join(part.response for part in client.generate(NAME, "Why?", raw=True, stream=True)) == "Hello there!"
    assert link.prompt == "Why?"


def test_think_and_format(client: Any, link: FakeLink):
    link.play(THOUGHT)
    message = client.chat(NAME, HELLO, think=True).message
    assert (message.thinking.strip(), message.content) == ("They ask.", "It is sunny.")
    link.play('{"place": "Bonn", "days": 2}')
    answer = client.chat(NAME, HELLO, format=Trip.model_json_schema())
    assert Trip.model_validate_json(answer.message.content) == Trip(place="Bonn", days=2)
    assert link.requests[-1].sampling.grammar


def test_tools_round_trip(client: Any, link: FakeLink):
    link.play(CALL, "Rain.")
    answer = client.chat(NAME, HELLO, tools=[weather])
    [call] = answer.message.tool_calls
    result = weather(**call.function.arguments)
    told = [*HELLO, answer.message, {"role": "tool", "content": result, "tool_name": call.function.name}]
    assert client.chat(NAME, told, tools=[weather]).message.content == "Rain."
    assert "2 days of rain in Bonn" in link.prompt


def test_models(client: Any):
    [listed] = client.list().models
    assert listed.model == f"{NAME}:latest"
    [loaded] = client.ps().models
    assert (loaded.model, loaded.context_length) == (listed.model, 4096)
    shown = client.show(listed.model)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo["qwen3.context_length"] == 4096
    assert [each.status for each in client.pull(listed.model, stream=True)][-1] == "success"


def test_errors_reach_the_client(client: Any, link: FakeLink):
    for call, status, message in (
        (lambda: client.chat("other", HELLO), 404, "not served here"),
        (lambda: client.delete("other"), 403, "--manage-models"),
        (lambda: client.chat(NAME, HELLO, options={"temperature": -1}), 400, "options.temperature"),
        (lambda: client.embed(NAME, "x"), 400, "not an embedding model"),
    ):
        with pytest.raises(ollama.ResponseError, match=message) as refused:
            call()
        assert refused.value.status_code == status
    link.play(Script(("Hel",), "error", "The GPU is gone."))
    with pytest.raises(ollama.ResponseError, match="The GPU is gone"):
        list(client.chat(NAME, HELLO, stream=True))


SCRIPT = """
import { Ollama } from 'ollama'
const client = new Ollama({ host: process.argv[2] })
const model = (await client.list()).models[0].name
const messages = [{ role: 'user', content: 'Name the capital of France.' }]
const options = { temperature: 0, num_predict: 20 }
let streamed = ''
for await (const part of await client.chat({ model, messages, options, stream: true })) streamed += part.message.content
const whole = await client.chat({ model, messages, options })
const properties = { city: { type: 'string', maxLength: 9 } }
const format = { type: 'object', properties, required: ['city'], additionalProperties: false }
const prompt = 'The capital of France, as JSON.'
const shaped = await client.generate({ model, prompt, format, options: { temperature: 0, num_predict: 60 } })
const shown = await client.show({ model })
console.log(JSON.stringify({ streamed, whole, shaped, shown }))
"""


@pytest.mark.slow
def test_the_javascript_client_and_the_built_in_model(tmp_path: Path):
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    installed = subprocess.run(["npm", "install", "ollama"], cwd=tmp_path, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"npm cannot install ollama: {installed.stderr.strip()[-200:]}")
    (tmp_path / "try.mjs").write_text(SCRIPT)
    with running(locate(), exact=False, context=1024) as server:
        command = ["node", "try.mjs", server.url]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "no_proxy": "*"})
        assert done.returncode == 0, done.stderr
        client = ollama.Client(server.url)
        same = client.chat("tiny", [{"role": "user", "content": "Name the capital of France."}], options={"temperature": 0})
        client._client.close()
    found = json.loads(done.stdout)
    assert found["streamed"] == found["whole"]["message"]["content"] == same.message.content
    assert "Paris" in found["streamed"]
    assert json.loads(found["shaped"]["response"]).keys() == {"city"}
    assert found["shown"]["details"]["format"] == "gguf"
    assert found["shown"]["details"]["parameter_size"] == "134.5M"
    assert found["whole"]["eval_count"] > 0
