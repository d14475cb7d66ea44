"""Which of several models are loaded: on demand, within memory, in turn; with slots that play scripts."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from auraflux.serve.app import make_app
from auraflux.serve.auth import Access
from auraflux.serve.limits import Limits
from auraflux.serve.several import model_pool
from auraflux.serve.several.catalog import Catalog, Entry
from auraflux.serve.several.model_pool import ModelPool
from tests.serve.fake_link import Script
from tests.serve.several.fake_slots import GIB, World

COMPLETE = "/v1/completions"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(model_pool, "TURN_S", 0.05)
    monkeypatch.setattr(model_pool, "RETRY_S", 0.05)
    return World().install(monkeypatch)


def entries(*names: str, **more: Any) -> list[Entry]:
    return [Entry(name, f"{name}.gguf", **more) for name in names]


def run(
    work: Callable[[httpx.AsyncClient, ModelPool], Awaitable[None]], models: list[Entry], gib: float = 2, **more: Any
) -> None:
    """Run `work` with a client of a server of these models."""
    max_queue = more.pop("max_queue", 256)

    async def whole() -> None:
        catalog = Catalog(tuple(models), **{"load_timeout_s": 10, **more})
        pool = ModelPool(catalog, lambda *_: None, int(gib * GIB), Limits(), max_queue)
        transport = httpx.ASGITransport(make_app(pool, Access(manage_models=True)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20) as client:
            pool.start()
            try:
                await work(client, pool)
            finally:
                await pool.close()

    asyncio.run(whole())


async def complete(client: httpx.AsyncClient, model: str | None, **more: Any) -> httpx.Response:
    return await client.post(COMPLETE, json={"model": model, "prompt": "hello", "max_tokens": 4, **more})


async def loaded(client: httpx.AsyncClient) -> list[str]:
    return [model["name"].removesuffix(":latest") for model in (await client.get("/api/ps")).json()["models"]]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def test_models_are_loaded_when_requests_name_them(world: World):
    async def work(client: httpx.AsyncClient, pool: ModelPool) -> None:
        assert (await client.get("/ready")).status_code == 200
        for name in ("a", "a", "other", "a:latest"):
            answer = await complete(client, name)
            assert (answer.status_code, answer.json()["model"]) == (200, "a"), answer.text
        assert world.events == ["a"]
        assert (await complete(client, "b")).json()["model"] == "b"
        assert await loaded(client) == ["a", "b"]
        chat = {"model": "b", "messages": [{"role": "user", "content": "hi"}]}
        for path in ("/v1/chat/completions", "/api/chat"):
            assert (await client.post(path, json={**chat, "stream": False})).status_code == 200
        assert (await client.post("/v1/messages", json={**chat, "max_tokens": 4})).status_code == 200
        assert (await client.post("/tokenize", json={"model": "a", "prompt": "hi"})).json()["count"] > 0
        assert world.events == ["a", "b"]

    run(work, [Entry("a", "a.gguf", ("other",)), Entry("b", "b.gguf")])


def test_unknown_and_missing_names_are_refused(world: World):
    async def work(client: httpx.AsyncClient, pool: ModelPool) -> None:
        unknown, missing = await complete(client, "c"), await complete(client, None)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert (missing.status_code, missing.json()["error"]["code"]) == (400, "model_missing")
        assert "a, b" in unknown.text
        # only the loaded model knows what it serves under its name
        part = await complete(client, "a:part")
        assert (part.status_code, part.json()["error"]["code"], world.events) == (404, "model_not_found", ["a"])
        assert (await client.get("/v1/models/c")).status_code == 404
        assert (await client.post("/api/show", json={"model": "c"})).status_code == 404

    run(work, entries("a", "b"))


def test_least_recently_used_model_leaves(world: World):
    async def work(client: httpx.AsyncClient, pool: ModelPool) -> None:
        for name in ("a", "b", "a", "c"):
            assert (await complete(client, name)).status_code == 200
        assert world.events == ["a", "b", "-b", "c"]
        assert world.most <= 2 * GIB

    run(work, entries("a", "b", "c"))


def test_pinned_models_are_loaded_first_and_stay(world: World):
    async def work(client: httpx.AsyncClient, pool: ModelPool) -> None:
        assert (await client.get("/ready")).status_code == 503
        await until(lambda: "a" in world.events)
        assert (await client.get("/ready")).status_code == 200
        for name in ("b", "c", "b"):
            assert (await complete(client, name)).status_code == 200
        assert world.events == ["a", "b", "-b", "c", "-c", "b"]
        unloaded = await client.post("/api/generate", json={"model": "a", "keep_alive": 0})
        assert unloaded.json()["done_reason"] == "load"

    run(work, [*entries("a", pinned=True), *entries("b", "c")])


def test_a_model_that_never_fits_is_refused(world: World):
    async def work(client: httpx.AsyncClient, pool: ModelPool) -> None:
        await until(lambda: "a" in world.events)
        answer = await complete(client, "large")
        assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "false")
        assert "needs 1.61 GB" in answer.text
        assert "next to a" in answer.text

    run(work, [*entries("a", pinned=True), Entry("large", "l", settings={"nbytes": int(1.5 * GIB)})])


def test_requests_wait_while_a_model_is_loaded(world: World):
    async def work(client: httpx.AsyncClient, pool: ModelPool) -> None:
        world.hold = asyncio.Event()
        waiting = [asyncio.ensure_future(complete(client, "a")) for _ in range(20)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        # others are served meanwhile: not this path, which needs no model
        assert (await client.get("/v1/models")).status_code == 200
        world.hold.set()
        assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}
        assert world.events == ["a"]

    # a process imports torch to describe the models, which takes long on a busy machine
    run(work, entries("a", "b"), load_timeout_s=600)


def test_waiting_is_bounded(world: World):
    async def work(client: httpx.AsyncClient, pool: ModelPool) -> None:
        world.hold = asyncio.Event()
        answers = await asyncio.gather(*(complete(client, "a") for _ in range(5)))
        assert sorted(answer.status_code for answer in answers) == [429, 429, 503, 503, 503]
        assert all(int(answer.headers["retry-after"]) > 0 for answer in answers)
        late = next(answer for answer in answers if answer.status_code == 503)
        assert late.json()["error"]["code"] == "model_loading"
        world.hold.set()
        assert (await complete(client, "a")).status_code == 200

    run(work, entries("a", "b"), load_timeout_s=0.1, max_queue=3)


def test_a_busy_model_finishes_and_gives_way(world: World):
    async def work(client: httpx.AsyncClient, pool: ModelPool) -> None:
        stop = False
        served = 0

        async def keep_busy() -> None:
            nonlocal served
            while not stop:
                assert (await complete(client, "a")).status_code == 200
                served += 1

        busy = [asyncio.ensure_future(keep_busy()) for _ in range(4)]
        await until(lambda: served > 8)
        assert (await complete(client, "b")).status_code == 200
        before = served
        # requests for the model that left were not lost, and bring it back
        await until(lambda: served > before + 8)
        stop = True
        await asyncio.gather(*busy)
        assert world.events[:4] == ["a", "-a", "b", "-b"]
        assert world.most == GIB

    run(work, entries("a", "b"), gib=1.5)


def test_a_running_answer_is_not_interrupted(world: World):
    async def work(client: httpx.AsyncClient, pool: ModelPool) -> None:
        world.script = Script(("Hel", "lo"), None)
        running = asyncio.ensure_future(complete(client, "a"))
        await until(lambda: bool(world.links and world.links["a"].streams))
        late = await complete(client, "b")
        assert (late.status_code, late.json()["error"]["code"]) == (503, "model_loading")
        assert not running.done()
        world.links["a"].streams[0]._script = Script(("",), "stop")
        world.links["a"].streams[0]._stop.set()
        assert (await running).status_code == 200
        world.script = "Hello"
        assert (await complete(client, "b")).status_code == 200

    run(work, entries("a", "b"), gib=1.5, load_timeout_s=0.3)


def test_unused_models_are_unloaded(world: World):
    async def work(client: httpx.AsyncClient, pool: ModelPool) -> None:
        await complete(client, "a")
        await until(lambda: "-a" in world.events)
        # Ollama's field: for ever, then at once
        kept = await client.post("/api/generate", json={"model": "a", "keep_alive": -1})
        assert kept.json()["done_reason"] == "load"
        await asyncio.sleep(0.1)
        listed = (await client.get("/api/ps")).json()["models"]
        assert [(model["name"], model["size"]) for model in listed] == [("a:latest", GIB)]
        assert listed[0]["expires_at"].startswith("2318")
        gone = await client.post("/api/generate", json={"model": "a", "keep_alive": 0})
        assert gone.json()["done_reason"] == "unload"
        await until(lambda: world.events.count("-a") == 2)
        await client.post("/api/chat", json={"model": "b", "messages": [], "keep_alive": "1h"})
        [listed] = (await client.get("/api/ps")).json()["models"]
        assert not listed["expires_at"].startswith("2318")
        wrong = await client.post("/api/generate", json={"model": "a", "keep_alive": "soon"})
        assert (wrong.status_code, "keep_alive is 'soon'" in wrong.text) == (400, True)

    run(work, entries("a", "b"), keep_alive_s=0.03)


def test_a_model_that_cannot_be_loaded_is_tried_again_later(world: World):
    async def work(client: httpx.AsyncClient, pool: ModelPool) -> None:
        world.broken["a"] = "its config.json is damaged."
        for _ in range(2):
            answer = await complete(client, "a")
            assert (answer.status_code, "its config.json is damaged." in answer.text) == (503, True)
            assert answer.headers["retry-after"]
        assert (await complete(client, "b")).status_code == 200
        world.broken.clear()
        await asyncio.sleep(0.06)
        assert (await complete(client, "a")).status_code == 200

    run(work, entries("a", "b"))


def test_a_model_whose_process_ended_is_loaded_again(world: World):
    async def work(client: httpx.AsyncClient, pool: ModelPool) -> None:
        await complete(client, "a")
        slot = pool._by_name["a"]
        slot._ended(asyncio.Event())
        assert (await complete(client, "a")).status_code == 200
        assert world.events == ["a", "-a", "a"]

    run(work, entries("a", "b"))


def test_stopping_server_refuses_those_that_wait(world: World):
    async def work(client: httpx.AsyncClient, pool: ModelPool) -> None:
        world.hold = asyncio.Event()
        waiting = asyncio.ensure_future(complete(client, "a"))
        await asyncio.sleep(0.02)
        await pool.drain(1)
        answer = await waiting
        assert (answer.status_code, "stopping" in answer.text) == (503, True)
        assert (await client.get("/ready")).status_code == 503

    run(work, entries("a", "b"))


def test_metrics_name_their_model(world: World):
    async def work(client: httpx.AsyncClient, pool: ModelPool) -> None:
        await complete(client, "a")
        await complete(client, "b")
        await complete(client, "c")
        text = (await client.get("/metrics")).text
        # counters outlive the model
        for name in "abc":
            assert f'auraflux:prompt_tokens_total{{model_name="{name}"}} 5.0' in text
        assert 'auraflux:model_loaded{model_name="a"} 0.0' in text
        assert 'auraflux:model_loaded{model_name="c"} 1.0' in text
        assert "auraflux:model_loads_total 3.0" in text
        assert "auraflux:model_unloads_total 1.0" in text
        heads = [line for line in text.splitlines() if line.startswith("# HELP")]
        assert len(heads) == len(set(heads))

    run(work, entries("a", "b", "c"))


def test_200_random_requests_are_all_answered_within_memory(world: World):
    rng = random.Random(0)

    async def work(client: httpx.AsyncClient, pool: ModelPool) -> None:
        names = [rng.choice("abcd") for _ in range(200)]

        async def ask(number: int, name: str) -> httpx.Response:
            await asyncio.sleep(rng.random() * 0.5)
            return await complete(client, name, stream=number % 2 == 0)

        answers = await asyncio.gather(*(ask(number, name) for number, name in enumerate(names)))
        assert [answer.status_code for answer in answers] == [200] * 200
        assert all(f'"{name}"' in answer.text for name, answer in zip(names, answers, strict=True))

    sizes = {"a": 0.5, "b": 0.7, "c": 1.0, "d": 1.4}
    run(work, [Entry(name, name, settings={"nbytes": int(size * GIB)}) for name, size in sizes.items()], gib=1.5)
    assert world.most <= 1.5 * GIB
