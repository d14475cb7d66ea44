"""OpenAI's Files and Batch APIs: on disk, across restarts, and through OpenAI's client."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner

from auraflux.cli import main
from auraflux.serve.app import make_app, make_inner_app
from auraflux.serve.auth import Access
from auraflux.serve.batch import batches as module
from auraflux.serve.batch.batches import Batches
from auraflux.serve.batch.file_store import KEPT_S
from auraflux.serve.service import Service
from auraflux.serve.transport.http_process import HttpSettings
from tests.engine.tiny import tiny
from tests.serve.batch.test_lines import line
from tests.serve.fake_link import FakeLink, Script
from tests.serve.server import NAME, running

STALL = Script(("Hel",), None)
KEYS = {"authorization": "Bearer one"}
Work = Callable[[httpx.AsyncClient, Batches], Awaitable[Any]]


def run(folder: Path, link: FakeLink, work: Work, keys: tuple[str, ...] = ("one", "two")) -> Any:
    """Run `work` with a client of a server with files."""

    async def whole() -> Any:
        service, batches = Service(link), Batches(folder)
        transport = httpx.ASGITransport(make_app(service, Access(keys), batches))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=KEYS) as client:
            batches.start(make_inner_app(service))
            try:
                return await work(client, batches)
            finally:
                await batches.stop()

    return asyncio.run(whole())


async def submit(client: httpx.AsyncClient, content: bytes, endpoint: str = "/v1/completions") -> dict[str, Any]:
    file = (await client.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})).json()
    answer = await client.post("/v1/batches", json={"input_file_id": file["id"], "endpoint": endpoint, "metadata": {"a": "b"}})
    return answer.json()


async def until(client: httpx.AsyncClient, id: str, *states: str) -> dict[str, Any]:
    async with asyncio.timeout(10):
        while (found := (await client.get(f"/v1/batches/{id}")).json())["status"] not in states:
            await asyncio.sleep(0.01)
    return found


async def ids_of(client: httpx.AsyncClient, file_id: str | None) -> list[str]:
    if file_id is None:
        return []
    content = (await client.get(f"/v1/files/{file_id}/content")).text
    return [json.loads(each)["custom_id"] for each in content.splitlines()]


def test_responses_and_errors(tmp_path: Path):
    async def work(client: httpx.AsyncClient, batches: Batches) -> None:
        lines = [line(str(number)) for number in range(30)] + [line("bad", temperature=-1), line("other", model="gpt-4")]
        state = await submit(client, b"".join(lines))
        assert (state["object"], state["metadata"]) == ("batch", {"a": "b"})
        done = await until(client, state["id"], "completed", "failed")
        assert (done["status"], done["request_counts"]) == ("completed", {"total": 32, "completed": 30, "failed": 2})
        assert sorted(await ids_of(client, done["output_file_id"]), key=int) == [str(number) for number in range(30)]
        assert sorted(await ids_of(client, done["error_file_id"])) == ["bad", "other"]
        content = (await client.get(f"/v1/files/{done['output_file_id']}/content")).text.splitlines()
        response = json.loads(content[0])["response"]
        assert (response["status_code"], response["body"]["choices"][0]["text"]) == (200, "Hello there!")
        listed = (await client.get("/v1/batches?limit=1")).json()
        assert ([each["id"] for each in listed["data"]], listed["has_more"]) == ([state["id"]], False)

    run(tmp_path, FakeLink(), work)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "no requests"), (b"{", "line 1 is not valid JSON"), (line(url="/v1/embeddings"), "the batch's endpoint")],
)
def test_invalid_file_fails_its_batch(tmp_path: Path, content: bytes, message: str):
    async def work(client: httpx.AsyncClient, batches: Batches) -> None:
        failed = await until(client, (await submit(client, content))["id"], "failed")
        assert message in failed["errors"]["data"][0]["message"]
        # the next one runs
        assert (await until(client, (await submit(client, line()))["id"], "completed"))["status"] == "completed"

    run(tmp_path, FakeLink(), work)


def test_restart_loses_and_doubles_nothing(tmp_path: Path):
    names = [str(number) for number in range(25)]
    link = FakeLink(*["Hello"] * 10, STALL)

    async def begin(client: httpx.AsyncClient, batches: Batches) -> str:
        state = await submit(client, b"".join(map(line, names)))
        async with asyncio.timeout(10):
            while len(link.requests) < 10 + module.AT_ONCE:
                await asyncio.sleep(0.01)
        return state["id"]

    id = run(tmp_path, link, begin)
    journal = tmp_path / "batches" / id / "output.jsonl"
    assert journal.read_bytes().count(b"\n") == 10
    # the machine failed while a line was written
    with journal.open("ab") as file:
        file.write(b'{"custom_id": "24", "resp')

    async def rest(client: httpx.AsyncClient, batches: Batches) -> None:
        done = await until(client, id, "completed")
        assert sorted(await ids_of(client, done["output_file_id"]), key=int) == names
        assert done["request_counts"] == {"total": 25, "completed": 25, "failed": 0}

    run(tmp_path, FakeLink(), rest)
    run(tmp_path, FakeLink(), rest)
    assert len(list((tmp_path / "files").iterdir())) == 2


def test_cancelled_batch_keeps_its_responses(tmp_path: Path):
    link = FakeLink(*["Hello"] * 3, STALL)

    async def work(client: httpx.AsyncClient, batches: Batches) -> None:
        state = await submit(client, b"".join(line(str(number)) for number in range(20)))
        async with asyncio.timeout(10):
            while len(link.requests) < 3 + module.AT_ONCE:
                await asyncio.sleep(0.01)
        assert (await client.post(f"/v1/batches/{state['id']}/cancel")).json()["status"] == "cancelling"
        done = await until(client, state["id"], "cancelled")
        assert len(await ids_of(client, done["output_file_id"])) == 3
        assert all(stream.cancelled for stream in link.streams[3:])
        again = await client.post(f"/v1/batches/{state['id']}/cancel")
        assert (again.status_code, "is cancelled" in again.text) == (400, True)

    run(tmp_path, link, work)


def test_busy_model_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("auraflux.serve.batch.work.WAIT_S", 0.01)
    link = FakeLink(ready=False)

    async def work(client: httpx.AsyncClient, batches: Batches) -> None:
        state = await submit(client, line("a"))
        await asyncio.sleep(0.05)
        link.load()
        done = await until(client, state["id"], "completed")
        assert await ids_of(client, done["output_file_id"]) == ["a"]

    run(tmp_path, link, work)


def test_files_belong_to_their_key(tmp_path: Path):
    async def work(client: httpx.AsyncClient, batches: Batches) -> None:
        state = await submit(client, line())
        done = await until(client, state["id"], "completed")
        other = {"authorization": "Bearer two"}
        for path in (
            f"/v1/files/{done['output_file_id']}",
            f"/v1/files/{done['input_file_id']}/content",
            f"/v1/batches/{state['id']}",
        ):
            assert (await client.get(path)).status_code == 200
            assert (await client.get(path, headers=other)).status_code == 404
        assert (await client.get("/v1/files", headers=other)).json()["data"] == []
        assert (await client.delete(f"/v1/files/{done['input_file_id']}", headers=other)).status_code == 404
        assert (
            await client.post(
                "/v1/batches", json={"input_file_id": done["input_file_id"], "endpoint": "/v1/completions"}, headers=other
            )
        ).status_code == 404
        assert len((await client.get("/v1/files")).json()["data"]) == 2
        assert (await client.delete(f"/v1/files/{done['input_file_id']}")).json()["deleted"]
        assert len((await client.get("/v1/files?purpose=batch_output")).json()["data"]) == 1
        assert len((await client.get("/v1/files?purpose=batch")).json()["data"]) == 0

    run(tmp_path, FakeLink(), work)


def test_invalid_requests_are_refused(tmp_path: Path):
    async def work(client: httpx.AsyncClient, batches: Batches) -> None:
        for path in ("/v1/files/x", "/v1/files/..%2f..", "/v1/batches/batch_0", "/v1/files/file_" + "0" * 32):
            assert (await client.get(path)).status_code == 404
        for body in (
            {},
            {"input_file_id": "x", "endpoint": "/v1/models"},
            {"input_file_id": "../x", "endpoint": "/v1/completions"},
        ):
            assert (await client.post("/v1/batches", json=body)).status_code in (400, 404)
        assert (await client.get("/v1/files?limit=no")).status_code == 400
        form = {"files": {"file": ("a", b"x")}, "data": {"purpose": "fun"}}
        assert (await client.post("/v1/files", **form)).status_code == 400
        assert (await client.post("/v1/files", json={})).status_code == 400

    run(tmp_path, FakeLink(), work)


def test_expired_files_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def fill(client: httpx.AsyncClient, batches: Batches) -> None:
        await until(client, (await submit(client, line()))["id"], "completed")

    run(tmp_path, FakeLink(), fill)
    (tmp_path / "files" / ".file_0").mkdir()
    assert len(list(tmp_path.glob("*/*"))) == 4
    later = time.time() + KEPT_S + 5
    monkeypatch.setattr(time, "time", lambda: later)

    async def nothing(client: httpx.AsyncClient, batches: Batches) -> None:
        await asyncio.sleep(0.05)

    run(tmp_path, FakeLink(), nothing)
    assert list(tmp_path.glob("*/*")) == []


def test_server_without_a_folder_says_how_to_enable_files(tmp_path: Path):
    async def work() -> None:
        transport = httpx.ASGITransport(make_app(Service(FakeLink())))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for path in ("/v1/files", "/v1/batches", "/v1/files/x/content"):
                answer = await client.get(path)
                assert (answer.status_code, "--files FOLDER" in answer.text) == (404, True)

    asyncio.run(work())


def test_openai_client(tmp_path: Path):
    asked = [{"role": "user", "content": "The quick brown fox."}]
    body = {"model": NAME, "messages": asked, "max_tokens": 8, "temperature": 0}
    requests = tmp_path / "in.jsonl"
    requests.write_bytes(b"".join(line(str(number), "/v1/chat/completions", **body) for number in range(12)))
    with (
        running(settings=HttpSettings(grace_s=0.5, files=tmp_path / "kept")) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with requests.open("rb") as file:
            stored = client.files.create(file=file, purpose="batch")
        assert (stored.filename, stored.bytes) == ("in.jsonl", requests.stat().st_size)
        batch = client.batches.create(input_file_id=stored.id, endpoint="/v1/chat/completions", completion_window="24h")
        end = time.monotonic() + 60
        while (batch := client.batches.retrieve(batch.id)).status not in ("completed", "failed"):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert (batch.status, batch.request_counts.completed, batch.error_file_id) == ("completed", 12, None)
        lines = [json.loads(each) for each in client.files.content(batch.output_file_id).text.splitlines()]
        assert sorted(int(each["custom_id"]) for each in lines) == list(range(12))
        direct = client.chat.completions.create(**body).choices[0].message.content
        assert {each["response"]["body"]["choices"][0]["message"]["content"] for each in lines} == {direct}
        assert [each.id for each in client.batches.list()] == [batch.id]
        assert client.files.delete(stored.id).deleted


def test_batch_command_goes_on_where_it_stopped(tmp_path: Path):
    requests, responses = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line(str(number), max_tokens=4, temperature=0, model="any") for number in range(12)]
    requests.write_bytes(b"".join([*lines, line("bad", temperature=-1)]))
    command = ["batch", str(requests), str(responses), "--model", str(tiny()), "--device", "cpu", "--cache-memory", "50MB"]

    def ids() -> list[str]:
        return [json.loads(each)["custom_id"] for each in responses.read_text().splitlines()]

    found = CliRunner().invoke(main, command)
    assert found.exit_code == 0, found.output
    assert sorted(ids()) == sorted([*map(str, range(12)), "bad"])
    texts = {each["response"]["status_code"] for each in map(json.loads, responses.read_text().splitlines())}
    assert texts == {200, 400}
    whole = responses.read_bytes()
    responses.write_bytes(whole[: len(whole) // 2])
    found = CliRunner().invoke(main, command)
    assert found.exit_code == 0, found.output
    assert sorted(ids()) == sorted([*map(str, range(12)), "bad"])
    found = CliRunner().invoke(main, command)
    assert "all 13 responses are in" in found.output


def test_batch_command_refuses_wrong_files(tmp_path: Path):
    requests = tmp_path / "in.jsonl"
    requests.write_bytes(line() + b"{")
    for arguments, message in (
        ([str(tmp_path / "none"), "out"], "cannot be read"),
        ([str(requests), "out"], "line 2 is not valid JSON"),
        ([str(requests), str(tmp_path)], "line 2"),
    ):
        found = CliRunner().invoke(main, ["batch", *arguments, "--model", str(tiny())])
        assert (found.exit_code, message in found.output) == (1, True), found.output
    requests.write_bytes(line())
    found = CliRunner().invoke(main, ["batch", str(requests), str(requests), "--model", str(tiny())])
    assert "give another file for the responses" in found.output
