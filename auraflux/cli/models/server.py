"""`ask`: a request to a running server, by Ollama's API, which every server has."""

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import click

from auraflux.errors import InputError, SettingsError

# where `auraflux serve` and `auraflux serve --ollama` listen
DEFAULT_URLS = ("http://127.0.0.1:8000", "http://127.0.0.1:11434")
TIMEOUT_S = 10.0
# an answer about models is small; another program may listen there
ANSWER_NBYTES = 1 << 24
url_option = click.option(
    "--url", metavar="URL", help="The server's address; by default ports 8000 and 11434 of this machine are asked."
)


class NoServer(InputError):
    """No server of auraflux answers at an address."""


def addresses(url: str | None) -> tuple[str, ...]:
    """Return the addresses to ask."""
    if url is None:
        return DEFAULT_URLS
    given = url if "://" in url else f"http://{url}"
    if urllib.parse.urlsplit(given).scheme not in ("http", "https"):
        raise SettingsError(f"--url is {url[:200]!r}; give the address of a server, such as http://127.0.0.1:8000.")
    return (given.rstrip("/").removesuffix("/v1"),)


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a server's answer; raise NoServer if none answers, InputError if it refuses."""
    key = os.environ.get("AURAFLUX_API_KEY", "").strip()
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    try:
        asked = urllib.request.Request(f"{url}{path}", data, headers)
        with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
            found = json.loads(answer.read(ANSWER_NBYTES))
    except urllib.error.HTTPError as err:
        with err:
            raise InputError(f"the server at {url} answered {err.code}: {_reason(err.read(ANSWER_NBYTES))}") from err
    except (OSError, ValueError) as err:
        reason = getattr(err, "reason", None)
        raise NoServer(f"no server answers at {url}: {getattr(reason, 'strerror', None) or reason or err}.") from err
    if not isinstance(found, dict):
        raise NoServer(f"what answers at {url} is no server of auraflux.")
    return found


def _reason(text: bytes) -> str:
    try:
        found = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        found = "it gave no reason"
    said = str(found.get("message") if isinstance(found, dict) else found)[:500]
    return said if said.endswith(".") else f"{said}."
