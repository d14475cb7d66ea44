"""Images from URLs: only from public addresses, and within limits."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from auraflux.errors import InputError
from auraflux.serve.chat import image_fetch
from auraflux.serve.chat.image_fetch import fetch_image, is_public
from auraflux.serve.chat.images import ImageSource
from tests.vision.qwen_models import file_of, picture

IMAGE = file_of(picture(8, 8))
PRIVATE = """127.0.0.1 10.1.2.3 172.16.0.9 192.168.1.1 169.254.169.254 0.0.0.0 100.64.0.1 224.0.0.1 255.255.255.255 ::1 ::
fe80::1 fe80::1%eth0 fc00::1 ff02::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 2002:7f00:0001:: 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe"""
PUBLIC = "8.8.8.8 1.1.1.1 2606:4700:4700::1111 ::ffff:8.8.8.8 64:ff9b::808:808"


@pytest.mark.parametrize(("address", "wanted"), [*((a, False) for a in PRIVATE.split()), *((a, True) for a in PUBLIC.split())])
def test_public_addresses(address, wanted):
    assert is_public(address) is wanted


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path.startswith("/to"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to?") if "?" in self.path else "/to")
            self.end_headers()
            return
        self.send_response(200 if self.path == "/image" else 404 if self.path == "/gone" else 200)
        self.end_headers()
        self.wfile.write(IMAGE if self.path == "/image" else bytes(1 << 20))

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()
        thread.join()


@pytest.fixture
def local(monkeypatch) -> None:
    """Let this machine's addresses pass for public ones, all but 127.0.0.9."""
    monkeypatch.setattr(image_fetch, "is_public", lambda address: address != "127.0.0.9")


def test_an_image_is_fetched(server, local):
    assert fetch_image(f"{server}/image") == IMAGE
    assert fetch_image(f"{server}/to?/image") == IMAGE


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "0.0.0.0", "2130706433", "0x7f.1"])
def test_this_machine_is_refused(server, host):
    with pytest.raises(InputError, match=r"not public|cannot be fetched"):
        fetch_image(f"http://{host}:{server.rpartition(':')[2]}/image")


def test_redirects_are_checked_too(server, local):
    port = server.rpartition(":")[2]
    with pytest.raises(InputError, match="not public"):
        fetch_image(f"{server}/to?http://127.0.0.9:{port}/image")
    with pytest.raises(InputError, match="must be http or https"):
        fetch_image(f"{server}/to?file:///etc/passwd")
    with pytest.raises(InputError, match="more than 3 times"):
        fetch_image(f"{server}/to")


def test_a_name_is_resolved_once(server, local, monkeypatch):
    resolve, asked = socket.getaddrinfo, []

    def first(host: str, *args: Any, **options: Any) -> Any:
        # numbers are looked up again when a socket connects
        asked.append(host)
        return resolve("127.0.0.1" if host == "rebinding.example" else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", first)
    assert fetch_image(f"http://rebinding.example:{server.rpartition(':')[2]}/image") == IMAGE
    assert asked.count("rebinding.example") == 1


def test_size_status_and_time_are_limited(server, local, monkeypatch):
    with pytest.raises(InputError, match="status 404"):
        fetch_image(f"{server}/gone")
    monkeypatch.setattr(image_fetch, "MAX_NBYTES", 1000)
    with pytest.raises(InputError, match="more than 1,000 bytes"):
        fetch_image(f"{server}/large")
    monkeypatch.setattr(image_fetch, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(InputError, match=r"TimeoutError|did not answer"):
        fetch_image(f"http://127.0.0.1:{silent.getsockname()[1]}/image")


@pytest.mark.parametrize(
    "url", ["http://", "http://user:word@host/", "http://[::", "http://host:99999/", "http://h/\n\r", "ftp://h/"]
)
def test_odd_urls_are_refused(url):
    with pytest.raises(InputError):
        fetch_image(url)


def test_fetching_is_off_by_default(server):
    with pytest.raises(InputError, match="--allow-image-urls"):
        ImageSource("messages.0", url=f"{server}/image").read(False)
