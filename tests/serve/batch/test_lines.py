"""What a batch reads and writes: its lines, its journal, and uploaded forms."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auraflux.errors import InputError
from auraflux.serve.batch.journal import Journal
from auraflux.serve.batch.lines import read_lines
from auraflux.serve.batch.multipart import parse_form
from auraflux.serve.failures import Failure

COMPLETE = "/v1/completions"


def line(id: str = "a", url: str = COMPLETE, **body: Any) -> bytes:
    return json.dumps({"custom_id": id, "method": "POST", "url": url, "body": {"prompt": "x", **body}}).encode() + b"\n"


def test_lines():
    first, second = read_lines([line("a"), b"\n", line("b", max_tokens=3)], COMPLETE)
    assert (first.id, first.number, second.number) == ("a", 1, 3)
    assert second.body == {"prompt": "x", "max_tokens": 3}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no requests"),
        ([b"  \n"], "no requests"),
        ([line("a"), b"{"], "line 2 is not valid JSON"),
        ([b"[1]"], "line 1 is not a JSON object"),
        ([b"{}"], "line 1 has no custom_id"),
        ([line("")], "line 1 has no custom_id"),
        ([line("a" * 513)], "custom_id of 1 to 512"),
        ([line("a"), line("a")], "line 2 repeats the custom_id 'a'"),
        ([line(url="/v1/models")], "url is '/v1/models'; it may be"),
        ([line(url="/v1/embeddings")], "the batch's endpoint is /v1/completions"),
        ([line(stream=True)], "line 1 asks for a stream"),
        ([b'{"custom_id": "a", "url": "/v1/completions"}'], "line 1 has no body"),
        ([b'{"custom_id": "a", "url": "/v1/completions", "method": "GET", "body": {}}'], "method is 'GET'"),
        ([b"[" * 100_000], "line 1 is not valid JSON"),
    ],
)
def test_invalid_lines_are_refused(lines: list[bytes], message: str):
    with pytest.raises(InputError, match=message):
        list(read_lines(lines, COMPLETE))


def test_journal_survives_an_interruption(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    with Journal(path) as journal:
        for id in ("a", "b", "a"):
            journal.append(id, {"custom_id": id, "text": "ü\u2028"})
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with Journal(path) as journal:
            for id in ("a", "b"):
                journal.append(id, {"custom_id": id, "text": "ü\u2028"})
        assert path.read_bytes() == whole


def test_journal_refuses_other_files(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("something\nprecious")
    with pytest.raises(InputError, match="line 1 that is no response"):
        Journal(path)
    assert path.read_text() == "something\nprecious"


@given(st.binary(max_size=300), st.text(max_size=20).filter(lambda text: not set(text) & set('"\\\r\n')))
def test_forms_of_httpx(content: bytes, purpose: str):
    request = httpx.Request("POST", "http://x", files={"file": ("n.jsonl", content)}, data={"purpose": purpose})
    form = parse_form(request.headers["content-type"], request.read())
    assert (form.content, form.filename, form.fields) == (content, "n.jsonl", {"purpose": purpose})


@pytest.mark.parametrize("body", [b"", b"--b", b"--b--", b"--b\r\nx\r\n--b--", b"--b\r\n\r\nx\r\n--b--", b"\r\n--b\r\n" * 50])
def test_invalid_forms_are_refused(body: bytes):
    with pytest.raises(Failure, match="form"):
        parse_form("multipart/form-data; boundary=b", body)
    with pytest.raises(Failure, match="multipart/form-data"):
        parse_form("application/json", body)
