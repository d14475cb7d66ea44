"""The workload: the server's address, the body of each request, and when each is sent."""

import json
import random
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from auraflux.errors import InputError

DEFAULT_VOCAB = 10_000  # where the server does not report its vocabulary size; every vocabulary is larger
MIN_ID = 1_000  # special tokens are below it, in vocabularies that put them first


@dataclass(frozen=True)
class Target:
    """The address of a server.

    base     prefix of its paths before /v1
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
    """Parse an address such as http://127.0.0.1:8000 or http://127.0.0.1:8000/v1."""
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
    """The parameters that all requests share.

    model        name on the server
    vocab        prompts are random tokens below it
    prompt       prompt tokens, of which all prompts share the first `shared`
    tokens       output tokens
    seed         of the prompts: another seed has no prefix cache hits
    temperature  of sampling; 0 is greedy
    """

    model: str
    vocab: int = DEFAULT_VOCAB
    prompt: int = 1024
    tokens: int = 128
    shared: int = 0
    stream: bool = True
    seed: int = 0
    timeout_s: float = 600.0
    temperature: float = 0.0

    def ids(self, name: str) -> list[int]:
        """Return the prompt of that name."""
        low = min(MIN_ID, self.vocab // 2)
        span = range(low, self.vocab)
        shared = random.Random(f"{self.seed} shared").choices(span, k=self.shared)
        return shared + random.Random(f"{self.seed} {name}").choices(span, k=self.prompt - self.shared)

    def body(self, name: str, tokens: int) -> bytes:
        """Return the body of a request to /v1/completions."""
        request = {
            "model": self.model,
            "prompt": self.ids(name),
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": self.temperature,
            "stream": self.stream,
        }
        if self.stream:
            request["stream_options"] = {"include_usage": True}
        return json.dumps(request, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Chain:
    """Requests of one client, each sent when the one before it has ended.

    delay_s  after the common start, when the first is due
    names    of their prompts
    tokens   output tokens of each
    """

    client: int
    delay_s: float
    names: tuple[str, ...]
    tokens: int


def together(name: str, clients: int, requests: int, tokens: int) -> list[Chain]:
    """Spread requests over clients that all start at once."""
    return staggered(name, clients, requests, tokens, 0.0)


def staggered(name: str, clients: int, requests: int, tokens: int, over_s: float) -> list[Chain]:
    """Spread requests over clients that start evenly over `over_s`."""
    counts = [requests // clients + (client < requests % clients) for client in range(clients)]
    return [
        Chain(client, over_s * client / clients, tuple(f"{name} {client} {i}" for i in range(count)), tokens)
        for client, count in enumerate(counts)
        if count
    ]


def poisson(name: str, rate: float, requests: int, tokens: int, seed: int) -> list[Chain]:
    """Make requests that arrive as a Poisson process, `rate` a second, however many are running."""
    generator, due, chains = random.Random(f"{seed} {name} times"), 0.0, []
    for i in range(requests):
        due += generator.expovariate(rate)
        chains.append(Chain(i, due, (f"{name} {i}",), tokens))
    return chains
