"""What is asked of a server: where it is, what each request wants, and when each is sent."""

import json
import random
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from auraflux.errors import InputError

USUAL_VOCAB = 10_000  # tokens that any vocabulary has, where the server does not tell its size
LOWEST_ID = 1_000  # below it are the tokens with a meaning of their own, in vocabularies that put them first


@dataclass(frozen=True)
class Target:
    """Where a server is.

    base     what stands before /v1 in the paths of its API
    api_key  sent with every request, if there is one
    """

    host: str
    port: int
    secure: bool = False
    base: str = ""
    api_key: str | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.secure else ''}://{host}:{self.port}{self.base}"


def parse_url(url: str, api_key: str | None = None) -> Target:
    """The server an address such as http://127.0.0.1:8000 or http://127.0.0.1:8000/v1 names."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or re.search(r"[\s\x00-\x1f]", url):
        raise InputError(f"{url!r} is not the address of a server. Write it like http://127.0.0.1:8000.")
    if api_key is not None and (not api_key.isascii() or not api_key.isprintable()):
        raise InputError("the API key has characters that an HTTP header cannot hold.")
    secure = parts.scheme == "https"
    base = parts.path.rstrip("/").removesuffix("/v1")
    return Target(parts.hostname, port or (443 if secure else 80), secure, base, api_key)


@dataclass(frozen=True)
class Work:
    """What every request asks for.

    model        as the server calls it
    vocab        prompts are random tokens below it
    prompt       tokens of a prompt, the first `shared` of them the same in all
    tokens       to be written
    seed         of the prompts: another seed finds nothing in a prefix cache
    temperature  at which tokens are drawn; 0 for the likeliest
    """

    model: str
    vocab: int = USUAL_VOCAB
    prompt: int = 1024
    tokens: int = 128
    shared: int = 0
    stream: bool = True
    seed: int = 0
    timeout_s: float = 600.0
    temperature: float = 0.0

    def ids(self, name: str) -> list[int]:
        """The prompt of that name."""
        low = min(LOWEST_ID, self.vocab // 2)
        span = range(low, self.vocab)
        shared = random.Random(f"{self.seed} shared").choices(span, k=self.shared)
        return shared + random.Random(f"{self.seed} {name}").choices(span, k=self.prompt - self.shared)

    def body(self, name: str, tokens: int) -> bytes:
        """A request for /v1/completions."""
        asked = {
            "model": self.model,
            "prompt": self.ids(name),
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": self.temperature,
            "stream": self.stream,
        }
        if self.stream:
            asked["stream_options"] = {"include_usage": True}
        return json.dumps(asked, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Chain:
    """Requests that are sent one after another: each when the one before it has ended.

    delay_s  after the common start, when the first is due
    names    of their prompts
    tokens   to be written by each
    """

    client: int
    delay_s: float
    names: tuple[str, ...]
    tokens: int


def together(name: str, clients: int, requests: int, tokens: int) -> list[Chain]:
    """So many requests over so many clients, which all start at once."""
    return staggered(name, clients, requests, tokens, 0.0)


def staggered(name: str, clients: int, requests: int, tokens: int, over_s: float) -> list[Chain]:
    """The same, with the starts spread evenly over a time."""
    counts = [requests // clients + (client < requests % clients) for client in range(clients)]
    return [
        Chain(client, over_s * client / clients, tuple(f"{name} {client} {i}" for i in range(count)), tokens)
        for client, count in enumerate(counts)
        if count
    ]


def poisson(name: str, rate: float, requests: int, tokens: int, seed: int) -> list[Chain]:
    """Requests that come at random times, so many a second on average, whether or not others have ended."""
    generator, due, chains = random.Random(f"{seed} {name} times"), 0.0, []
    for i in range(requests):
        due += generator.expovariate(rate)
        chains.append(Chain(i, due, (f"{name} {i}",), tokens))
    return chains
