"""Mutations of what batches and several models read: uploads, lines of requests, journals, catalogs."""

import json
import random
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from auraflux.errors import InputError
from auraflux.serve.batch.journal import Journal
from auraflux.serve.batch.lines import read_lines
from auraflux.serve.keep_alive import parse_keep_alive
from auraflux.serve.several.catalog import read_catalog
from tests.fuzz.harness import Target
from tests.fuzz.mutate import mutated, mutated_bytes, odd
from tests.fuzz.mutate import text as mutated_text
from tests.fuzz.request_targets import client

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 1}}
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\n\r\n--b--\r\n'
)
CATALOG = """
memory = "12GB"
keep_alive = "10m"
load_timeout = 60

[models.small]
path = "small.gguf"
aliases = ["gpt-4o"]
pinned = true
kv = "k8v4"

[models."org/large"]
path = "org/large"
keep_alive = -1
"""
PATHS = ("/v1/files", "/v1/files/{}", "/v1/files/{}/content", "/v1/batches", "/v1/batches/{}", "/v1/batches/{}/cancel")


@cache
def folder() -> Path:
    return Path(mkdtemp(prefix="auraflux-fuzz-"))


def upload(rng: random.Random) -> None:
    """Upload a form and use the id that comes back, or a random one."""
    body = mutated_bytes(rng, FORM, 4) if rng.random() < 0.9 else FORM
    kind = rng.choice(
        ["multipart/form-data; boundary=b", 'multipart/form-data; boundary="b"', mutated_text(rng, "multipart/form-data")]
    )
    with_client = client()
    answer = with_client.post("/v1/files", content=body, headers={"content-type": kind.encode("ascii", "replace").decode()})
    id = answer.json()["id"] if answer.status_code == 200 else mutated_text(rng, "file_0123456789abcdef0123456789abcdef")
    # a path cannot hold control characters
    path = rng.choice(PATHS).format("".join(each for each in id if each.isprintable() and each not in "?#"))
    method = rng.choice(["GET", "POST", "DELETE"])
    answers = [answer, with_client.request(method, path, params={"limit": str(odd(rng))[:50].encode("utf8", "replace")})]
    if answer.status_code == 200:
        answers.append(with_client.delete(f"/v1/files/{id}"))
    for each in answers:
        assert each.status_code < 500, f"{method} {path}: {each.status_code} {each.text[:300]}"
    if answer.status_code >= 400:
        raise InputError(answer.json()["error"]["message"])


def lines(rng: random.Random) -> None:
    """Read mutated lines of requests, and a mutated journal, which then takes every response once."""
    given = [json.dumps(mutated(rng, {**LINE, "custom_id": str(number)}, 2)).encode() + b"\n" for number in range(3)]
    if rng.random() < 0.5:
        given[0] = mutated_bytes(rng, given[0], 3)
    found = list(read_lines(given))
    path = folder() / "out.jsonl"
    path.write_bytes(mutated_bytes(rng, b'{"custom_id": "0"}\n{"custom_id": "1"}\n', 3))
    for _ in range(2):
        with Journal(path) as journal:
            for line in found:
                journal.append(line.id, {"custom_id": line.id})
    stored = [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()]
    assert {line.id for line in found} <= set(map(str, stored))


def catalog(rng: random.Random) -> None:
    """Read a mutated list of models, and a duration."""
    path = folder() / "models.toml"
    path.write_bytes(mutated_bytes(rng, CATALOG.encode(), 6))
    read_catalog(path)
    given = rng.choice([mutated_text(rng, "1h30m"), odd(rng)])
    if isinstance(given, int | float | str):
        parse_keep_alive(given)


TARGETS = [Target("upload", upload, 30), Target("batch-lines", lines, 40), Target("catalog", catalog, 40)]
