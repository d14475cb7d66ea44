"""Start `auraflux serve` in a subprocess on a free port, for the examples that need a server."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import urlopen


@contextmanager
def serving(model: str | None, *options: str) -> Iterator[str]:
    """Yield the server's address when it is ready; stop the server at the end. Its log goes to stderr."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "auraflux", "serve", *([model] if model else []), "--port", str(port), *options]
    with subprocess.Popen(command) as process:
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def wait_until_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Poll /ready until the model is loaded."""
    while process.poll() is None:
        try:
            with urlopen(f"{url}/ready"):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit("the server ended before it was ready.")
