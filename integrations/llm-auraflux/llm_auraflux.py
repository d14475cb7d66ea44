"""Plugin for llm: downloaded models run in llm's process; the models of a running server are asked over HTTP.

Model ids begin with `auraflux/`. With the address of a server (`llm auraflux server URL`, or AURAFLUX_URL) they are its models,
else the downloaded ones.
"""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import llm
from llm.default_plugins.openai_models import AsyncChat, Chat
from llm.parts import TextPart
from pydantic import Field

from auraflux.errors import AurafluxError

PREFIX = "auraflux/"
BUILT_IN = "smollm2-135m-instruct"
# every llm command asks for the models first
TIMEOUT_S = 2.0
KEY = "auraflux"
KEY_VARIABLE = "AURAFLUX_API_KEY"


class ServedChat(Chat):
    """A model of a server."""

    needs_key, key_env_var = KEY, KEY_VARIABLE

    def get_key(self, explicit_key: str | None = None) -> str:
        return _key(explicit_key)

    def __str__(self) -> str:
        return f"auraflux, served: {self.model_id}"


class AsyncServedChat(AsyncChat):
    """A model of a server, for llm's asynchronous interface."""

    needs_key, key_env_var = KEY, KEY_VARIABLE

    def get_key(self, explicit_key: str | None = None) -> str:
        return _key(explicit_key)

    def __str__(self) -> str:
        return f"auraflux, served: {self.model_id}"


class LocalModel(llm.Model):
    """A downloaded model, loaded at its first prompt."""

    can_stream = True
    supports_schema = True

    class Options(llm.Options):
        """Options of a prompt; those left out are the model's own."""

        temperature: float | None = Field(None, description="Sampling temperature; 0 is greedy.", ge=0)
        top_p: float | None = Field(None, description="Nucleus sampling.", gt=0, le=1)
        top_k: int | None = Field(None, description="Sample among this many tokens.", ge=0)
        min_p: float | None = Field(None, description="Least probability, as a share of the likeliest token's.", ge=0, le=1)
        max_tokens: int | None = Field(None, description="Most tokens of the answer.", gt=0)
        seed: int | None = Field(None, description="Seed of sampling.", ge=0)
        kv: str | None = Field(None, description="KV cache: none, k8v8, k8v4, k4v4, ...")
        context: int | None = Field(None, description="Most tokens of prompt and answer.", gt=0)

    def __init__(self, name: str):
        self.model_id, self.name = f"{PREFIX}{name}", name

    def __str__(self) -> str:
        return f"auraflux: {self.model_id}"

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Iterator[str]:
        given = {key: value for key, value in prompt.options.model_dump().items() if value is not None}
        loading = {key: given.pop(key) for key in ("kv", "context") if key in given}
        if prompt.schema:
            from auraflux.serve.chat.conversation import Format
            from auraflux.serve.chat.structured_output import grammar_of

            given["grammar"] = grammar_of(Format("schema", prompt.schema))
        try:
            model = _loaded(self.name, tuple(sorted(loading.items())))
            deltas = model.chat(_messages(prompt), **given)
            if stream:
                yield from deltas
            else:
                yield "".join(deltas)
        except AurafluxError as err:
            raise llm.ModelError(str(err)) from err
        response.set_usage(input=model.stats.prompt_tokens + model.stats.reused_tokens, output=model.stats.tokens)


@llm.hookimpl
def register_models(register: Any) -> None:
    """Register the models of the server whose address is set, else the downloaded ones and the built-in one."""
    url = _server()
    if url is None:
        for name, alias in _downloaded().items():
            register(LocalModel(name), aliases=(f"{PREFIX}{alias}",) if alias else ())
        return
    for name in _served(url):
        about: dict[str, Any] = {"model_name": name, "api_base": f"{url}/v1"}
        about |= {"supports_schema": True, "supports_tools": True}
        register(ServedChat(f"{PREFIX}{name}", **about), AsyncServedChat(f"{PREFIX}{name}", **about))


@llm.hookimpl
def register_commands(cli: Any) -> None:
    """Add `llm auraflux server`."""

    @cli.group()
    def auraflux() -> None:
        """Settings of the auraflux plugin."""

    @auraflux.command()
    @click.argument("url", required=False)
    @click.option("--remove", is_flag=True, help="Use downloaded models, in llm's process.")
    def server(url: str | None, remove: bool) -> None:
        """Show the address of the server that answers, or set it."""
        if remove:
            _settings().unlink(missing_ok=True)
        elif url is not None:
            if not url.startswith(("http://", "https://")):
                raise click.ClickException(f"{url!r} is no address; give one such as http://127.0.0.1:8000.")
            _settings().parent.mkdir(parents=True, exist_ok=True)
            _settings().write_text(json.dumps({"server": _address(url)}))
        click.echo(_server() or "no server: downloaded models run in llm's process.")


def _settings() -> Path:
    return llm.user_dir() / "auraflux.json"


def _address(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _server() -> str | None:
    if url := os.environ.get("AURAFLUX_URL"):
        return _address(url)
    try:
        return str(json.loads(_settings().read_text())["server"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _key(explicit: str | None = None) -> str:
    # OpenAI's client needs some key, also for a server without one
    return llm.get_key(explicit, KEY, KEY_VARIABLE) or "none"


def _served(url: str) -> list[str]:
    """Return the names of a server's models; none, with a line on stderr, if it does not answer."""
    asked = urllib.request.Request(f"{url}/v1/models", headers={"authorization": f"Bearer {_key()}"})
    try:
        with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
            return [str(each["id"]) for each in json.loads(answer.read())["data"]]
    except urllib.error.HTTPError as err:
        reason = "it wants another key: llm keys set auraflux" if err.code == 401 else str(err)
    except (OSError, ValueError, KeyError, TypeError) as err:
        reason = str(err)
    click.echo(f"auraflux: the server at {url} does not list its models: {reason}.", err=True)
    return []


def _downloaded() -> dict[str, str | None]:
    """Return the names of the downloaded models and of the built-in one, with their short names."""
    from auraflux.weights.download.local_models import local_models
    from auraflux.weights.download.short_names import short_name

    return {name: short_name(name) for name in dict.fromkeys([*(name for name, _ in local_models()), BUILT_IN])}


@cache
def _loaded(name: str, options: tuple[tuple[str, Any], ...]) -> Any:
    import auraflux

    return auraflux.load(name, **dict(options))


def _messages(prompt: Any) -> list[dict[str, str]]:
    """Return a prompt's messages, those of its conversation before, as chat templates take them."""
    found = []
    for message in prompt.messages:
        text = "\n".join(part.text for part in message.parts if isinstance(part, TextPart))
        if text:
            found.append({"role": message.role, "content": text})
    return found
