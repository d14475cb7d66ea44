"""The first ten minutes of a new user: install the wheel, type six commands, chat in the browser. Needs the network.

Nothing is cached: the environment is fresh, the model is downloaded, and kernels are compiled where the kernels wheel is not
installed.
"""

import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import auraflux
from tests.install.wheels import ROOT
from tests.serve.answers import check_sane
from tests.serve.page.conftest import ask
from tests.serve.server import wait_until

pytestmark = pytest.mark.slow

QUESTION = "Name the capital of France."
SETTINGS = "temperature 0.2, top-p 0.9 (recommended for SmolLM2)"
CURSOR = "\x1b[6n"  # a program asks the terminal where the cursor is
TIMEOUT_S = 300.0
CODES = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|\][^\x07]*\x07|[=>])")


class User:
    """A new environment with the package, and a home folder in which nothing is cached."""

    def __init__(self, folder: Path, wheels: list[Path]):
        self.home = folder / "home"
        self.home.mkdir()
        self.command = folder / "venv" / "bin" / "auraflux"
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        first, *others = map(str, wheels)
        pip = [
            folder / "venv" / "bin" / "pip",
            "install",
            "--quiet",
            "-c",
            ROOT / "constraints.txt",
            f"{first}[serve]",
            *others,
        ]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode and re.search("NewConnectionError|NameResolutionError|No matching distribution", done.stderr):
            pytest.skip(f"packages cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, done.stderr

    @property
    def environment(self) -> dict[str, str]:
        """Return an environment without this one's caches and Python path."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("AURAFLUX", "PYTHON", "XDG", "NUMBA"))
        }
        return {**kept, "XDG_CACHE_HOME": str(self.home), "TERM": "xterm"}

    @property
    def compiled(self) -> list[str]:
        """List the kernels that were compiled."""
        return [path.name for path in self.home.rglob("*.nbc")]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        options = {"capture_output": True, "text": True, "cwd": self.home, "env": self.environment}
        done = subprocess.run([self.command, *words], check=False, stdin=subprocess.DEVNULL, **options)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        return done


class Terminal:
    """A program on a terminal, and what it has shown."""

    def __init__(self, user: User, *words: str):
        self.leader, follower = pty.openpty()
        os.set_blocking(self.leader, True)
        self.popen = subprocess.Popen(
            [user.command, *words], stdin=follower, stdout=follower, stderr=follower, cwd=user.home, env=user.environment
        )
        os.close(follower)
        self.seen = ""
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        # reading fails once the program has ended
        with suppress(OSError):
            while octets := os.read(self.leader, 4096):
                text = octets.decode(errors="replace")
                self.seen += CODES.sub("", text)
                if CURSOR in text:
                    os.write(self.leader, b"\x1b[1;1R")

    def type(self, line: str) -> None:
        os.write(self.leader, f"{line}\r".encode())

    def wait_for(self, text: str) -> str:
        """Wait for a text; return what was shown before it, and forget both."""
        wait_until(lambda: text in self.seen or self.popen.poll() is not None, TIMEOUT_S)
        assert text in self.seen, self.seen
        before, _, self.seen = self.seen.partition(text)
        return before

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        self.thread.join()
        os.close(self.leader)


@contextmanager
def serving(user: User) -> Iterator[tuple[str, list[str]]]:
    """Serve the built-in model; yield the address and the lines of the log."""
    words = [user.command, "serve", "--port", "0"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=user.home, env=user.environment) as server:
        lines: list[str] = []
        reading = threading.Thread(target=lambda: lines.extend(server.stderr or ()))
        reading.start()
        try:
            wait_until(lambda: any("chat page" in line for line in lines) or server.poll() is not None, TIMEOUT_S)
            found = re.search(r"chat page (http://\S+)/,", "".join(lines))
            assert found, lines
            yield found[1], lines
        finally:
            server.terminate()
            server.wait()
            reading.join()
        assert server.returncode == 0, lines


@pytest.fixture(scope="module", params=["compiling", "prebuilt"])
def user(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> User:
    """Install the wheel, alone and with that of the compiled kernels."""
    wheels = [wheel] if request.param == "compiling" else [wheel, request.getfixturevalue("kernels_wheel")]
    return User(tmp_path_factory.mktemp(request.param), wheels)


def test_six_commands(user: User):
    prebuilt = "prebuilt" in str(user.home)
    assert user.run("--version").stdout == f"auraflux {auraflux.__version__}\n"
    assert ("none for this version and processor" in user.run("doctor").stdout) != prebuilt
    done = user.run("generate", "--chat", "-p", QUESTION, "-n", "40", "--seed", "1")
    assert "Paris" in done.stdout
    check_sane(done.stdout)
    assert SETTINGS in done.stderr
    assert "llama" in user.run("inspect").stdout
    _chat(user)
    with serving(user) as (_, lines):
        assert any(SETTINGS in line for line in lines)
    assert bool(user.compiled) != prebuilt


def _chat(user: User) -> None:
    """Ask two questions on a terminal, and leave."""
    terminal = Terminal(user, "chat", "--seed", "1", "-n", "40")
    try:
        assert SETTINGS in terminal.wait_for("/help lists the commands.")
        for question, word in ((QUESTION, "Paris"), ("What is 2 + 2?", "4")):
            terminal.wait_for(">")
            terminal.type(question)
            # the line is shown while it is typed, then once more
            answer = terminal.wait_for("prompt ").rpartition(question)[2]
            check_sane(answer)
            assert word in answer
        terminal.type("/exit")
        assert terminal.popen.wait(TIMEOUT_S) == 0
    finally:
        terminal.close()


def test_the_chat_page(user: User, browser):
    """Ask, reload, and find the conversation and the sampling settings again."""
    expect = pytest.importorskip("playwright.sync_api").expect
    with serving(user) as (url, _):
        page = browser.new_context(viewport={"width": 1280, "height": 860}).new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith((url, "blob:")) else wrong.append(request.url))
        page.goto(url)
        expect(page.locator("#server-text")).to_have_text("smollm2-135m-instruct")
        page.set_default_timeout(TIMEOUT_S * 1000)
        ask(page, QUESTION)
        answer = page.locator(".reply .prose").inner_text()
        assert "Paris" in answer
        check_sane(answer)
        page.reload()
        expect(page.locator(".reply .prose")).to_have_text(answer)
        page.click("#open-tuning")
        assert page.locator("#set-temperature").get_attribute("placeholder") == "0.2"
        expect(page.locator("#tuning-source")).to_contain_text("recommended for SmolLM2")
        assert wrong == []
        page.context.close()
