"""The plugin for simonw's llm, with llm itself: models in its process, and those of a server."""

import gc
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from auraflux.loading.load import load
from auraflux.serve.app import make_app
from auraflux.serve.auth import Access
from auraflux.serve.service import Service
from auraflux.weights.download import local_models
from tests.engine.tiny import tiny
from tests.serve.fake_link import NAME, FakeLink, serving

llm = pytest.importorskip("llm", reason="llm is not installed")
from click.testing import CliRunner, Result  # noqa: E402

SOURCE = Path(__file__).parents[2] / "integrations" / "llm-auraflux" / "llm_auraflux.py"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bonn"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


def weather(place: str) -> str:
    """Return the weather of a place."""
    return f"rain in {place}"


@pytest.fixture(scope="module")
def plugin() -> Iterator[ModuleType]:
    """The plugin, registered as its entry point would be."""
    from llm.plugins import load_plugins, pm

    spec = importlib.util.spec_from_file_location("llm_auraflux", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["llm_auraflux"] = module
    spec.loader.exec_module(module)
    load_plugins()
    pm.register(module, "llm_auraflux")
    from llm.cli import cli

    module.register_commands(cli)
    yield module
    pm.unregister(module)
    cli.commands.pop("auraflux")
    del sys.modules["llm_auraflux"]


@pytest.fixture(autouse=True)
def folder(plugin: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    for name in ("AURAFLUX_URL", "AURAFLUX_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeLink, str]]:
    link = FakeLink()
    with serving(make_app(Service(link), Access(keys=("sk",)))) as url:
        yield link, url


@pytest.fixture
def link(served: tuple[FakeLink, str], monkeypatch: pytest.MonkeyPatch) -> FakeLink:
    monkeypatch.setenv("AURAFLUX_URL", f"{served[1]}/v1/")
    monkeypatch.setenv("AURAFLUX_API_KEY", "sk")
    served[0].requests.clear()
    served[0].play("Hello there!")
    return served[0]


@pytest.fixture
def local(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(local_models, "_hub_folder", lambda: Path(os.devnull))
    model = load(tiny(), "cpu", context=256)
    monkeypatch.setattr(plugin, "_loaded", lambda name, options: model)
    return model


def call(*words: str) -> Result:
    from llm.cli import cli

    return CliRunner().invoke(cli, list(words), catch_exceptions=False)


def test_its_entry_point_names_the_module():
    import tomllib

    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["llm"] == {"auraflux": SOURCE.stem}


def test_models_in_this_process(plugin: ModuleType, local: Any):
    model = llm.get_model("auraflux/smollm2:135m")
    assert model.model_id == "auraflux/smollm2-135m-instruct"
    response = model.prompt("hello", temperature=0, max_tokens=6, system="be kind")
    chunks = list(response)
    expected = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    assert "".join(chunks) == "".join(local.chat(expected, temperature=0, max_tokens=6))
    assert response.usage().output == 6
    assert model.prompt("hello", stream=False, temperature=0, max_tokens=6, system="be kind").text() == "".join(chunks)


def test_a_conversation_in_this_process(local: Any, monkeypatch: pytest.MonkeyPatch):
    sent: list[list[dict[str, str]]] = []
    reply = local.chat
    monkeypatch.setattr(local, "chat", lambda messages, **given: sent.append(messages) or reply(messages, **given))
    conversation = llm.get_model("auraflux/smollm2-135m-instruct").conversation()
    first = conversation.prompt("hello", temperature=0, max_tokens=3).text()
    conversation.prompt("more", temperature=0, max_tokens=3).text()
    assert [message["role"] for message in sent[1]] == ["user", "assistant", "user"]
    assert sent[1][1]["content"] == first


def test_a_schema_in_this_process(local: Any):
    response = llm.get_model("auraflux/smollm2-135m-instruct").prompt("x", schema=SCHEMA, seed=1, temperature=1, max_tokens=100)
    assert json.loads(response.text())["a"] in (1, 2)


def test_a_prompt_that_is_too_long_is_one_sentence(local: Any):
    done = CliRunner().invoke(llm.cli.cli, ["-m", "auraflux/smollm2:135m", "--no-log", "word " * 500])
    assert done.exit_code == 1
    assert done.output.startswith("Error: ")
    assert "256" in done.output


def test_the_command_streams_a_served_model(link: FakeLink):
    done = call("-m", f"auraflux/{NAME}", "hello")
    assert done.output == "Hello there!\n"
    assert f"auraflux, served: auraflux/{NAME}" in call("models", "-q", "auraflux").output
    link.play("More.")
    assert call("-c", "more").output == "More.\n"
    assert "Hello there!" in link.prompt


def test_tools_and_schemas_of_a_served_model(link: FakeLink):
    link.play(CALL, "It rains.")
    chain = llm.get_model(f"auraflux/{NAME}").chain("Will it rain?", tools=[weather])
    assert chain.text().endswith("It rains.")
    assert "rain in Bonn" in link.prompt
    link.play('{"a": 2}')
    assert json.loads(llm.get_model(f"auraflux/{NAME}").prompt("x", schema=SCHEMA).text()) == {"a": 2}
    assert link.requests[-1].sampling.grammar


# llm leaves the connection to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_asynchronous_interface(link: FakeLink):
    import asyncio

    async def ask() -> str:
        return await llm.get_async_model(f"auraflux/{NAME}").prompt("hello").text()

    assert asyncio.run(ask()) == "Hello there!"
    gc.collect()


def test_the_servers_address_is_stored(served: tuple[FakeLink, str], folder: Path, monkeypatch: pytest.MonkeyPatch):
    assert "no server" in call("auraflux", "server").output
    assert call("auraflux", "server", f"{served[1]}/v1").output == f"{served[1]}\n"
    refused = call("models", "-q", "auraflux/")
    assert "it wants another key: llm keys set auraflux" in refused.stderr
    monkeypatch.setenv("AURAFLUX_API_KEY", "sk")
    assert f"auraflux/{NAME}" in call("models", "-q", "auraflux/").output
    assert "no server" in call("auraflux", "server", "--remove").output
    assert call("auraflux", "server", "ftp://x").exit_code == 1


def test_a_server_that_is_away_leaves_other_models(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AURAFLUX_URL", "http://127.0.0.1:9")
    done = call("models")
    assert done.exit_code == 0
    assert "auraflux: the server at http://127.0.0.1:9 does not list its models" in done.stderr
    assert "gpt-4o" in done.output
