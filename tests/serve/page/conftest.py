"""Fixtures: a browser, and a stub server with the chat page."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette

from tests.serve.page_stub import stub

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync"
)


# not for the package: playwright's event loop runs as long as it does, and other modules' `asyncio.run` would refuse
@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"{CHROMIUM} is not there; the variable CHROMIUM names a browser")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield browser
        browser.close()


class Site:
    """A stub server on a free port, or on the port of another that has stopped."""

    def __init__(self, port: int = 0) -> None:
        self.app: Starlette = stub()
        self.socket = socket.create_server(("127.0.0.1", port))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self.server = uvicorn.Server(uvicorn.Config(self.app, log_level="error", timeout_graceful_shutdown=1))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})

    def start(self) -> "Site":
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        return self

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.socket.close()

    @property
    def received(self) -> list[dict]:
        return self.app.state.received


@pytest.fixture(scope="package")
def shared_site() -> Iterator[Site]:
    site = Site().start()
    yield site
    site.stop()


@pytest.fixture
def site(shared_site):
    state = shared_site.app.state
    state.key, state.loading, state.defaults, state.further = "", 0, {}, []
    state.modalities = ["text"]
    shared_site.received.clear()
    return shared_site


def ask(page, text: str, finished: bool = True) -> None:
    """Send a message, and wait for the whole answer."""
    page.fill("#question", text)
    page.keyboard.press("Enter")
    if finished:
        page.wait_for_selector("#send[aria-label^=Send]")
        page.wait_for_selector(".message.writing", state="detached")


@pytest.fixture
def page(browser, site):
    """Yield the page in a fresh browser context; fail on requests to other hosts and on policy violations."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    page = context.new_page()
    wrong: list[str] = []
    page.on("request", lambda request: None if request.url.startswith((site.url, "blob:")) else wrong.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if "Content Security Policy" in message.text else None)
    page.goto(site.url)
    yield page
    context.close()
    assert wrong == []
