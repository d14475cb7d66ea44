"""The server under test: one that runs, or one that is started here for the measurement."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from auraflux.bench.load.client import Client, ClientError, reason
from auraflux.bench.load.response import ProtocolError, Response
from auraflux.bench.load.workload import DEFAULT_VOCAB, Target
from auraflux.errors import BackendError, InputError

Progress = Callable[[str], None]
COMMAND = [sys.executable, "-m", "auraflux", "serve"]
HOST = "127.0.0.1"
RESPONSE_TIMEOUT_S = 10.0
POLL_S = 0.25
START_TIMEOUT_S = 1800.0  # for weights on a slow disk
STOP_TIMEOUT_S = 60.0
READY = "/ready"


@dataclass(frozen=True)
class Served:
    """The model of a server, as /v1/models reports it.

    vocab, device  None where the server does not report them
    """

    model: str
    vocab: int | None = None
    device: str | None = None


def ask_models(target: Target, wanted: str | None = None) -> Served:
    """Find a server's model of that name, or its first one."""
    response = _get(target, "/v1/models")
    if isinstance(response, str):
        raise BackendError(f"no server answers at {target.url}: {response}.")
    found = response.json()
    if response.status in (401, 403):
        raise InputError(f"the server at {target.url} wants an API key, or another one; give it with --api-key.")
    entries = found.get("data") if response.status == 200 and isinstance(found, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "id" in entry for entry in entries) or not entries:
        raise BackendError(f"{target.url}/v1/models answers HTTP {response.status} without a list of models.")
    names = [str(entry["id"]) for entry in entries]
    if wanted is not None and wanted not in names:
        raise InputError(f"the server at {target.url} has no model {wanted!r}. Those it has: {', '.join(names)}.")
    return _served(entries[0 if wanted is None else names.index(wanted)])


def _served(entry: dict[str, Any]) -> Served:
    meta = entry.get("meta")
    # llama-server reports it under `meta`
    vocab = entry.get("vocab_size") or (meta.get("n_vocab") if isinstance(meta, dict) else None)
    device = entry.get("device")
    known = isinstance(vocab, int) and vocab > 1
    return Served(str(entry["id"]), vocab if known else None, device if isinstance(device, str) else None)


def usable_vocab(served: Served) -> int:
    return DEFAULT_VOCAB if served.vocab is None else served.vocab


@contextmanager
def started(words: list[str], api_key: str | None, progress: Progress) -> Iterator[Target]:
    """Run `auraflux serve` with the given options on a free port until the block ends."""
    port = _free_port()
    # what is measured is a server that has warmed up
    command = [*COMMAND, *words, "--full-warm-up", "--host", HOST, "--port", str(port)]
    target = Target(HOST, port, api_key=api_key)
    with tempfile.TemporaryFile() as log:
        # in its own session: only this process receives Ctrl-C, and ends the server in order
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait_until_ready(process, target, log, progress)
            yield target
            if process.poll() is not None:
                raise BackendError(f"the server ended while it was measured: {_last_line(log)}")
        finally:
            stop(process)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Terminate a server, and kill it if it does not end."""
    if process.poll() is not None:
        return
    try:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_TIMEOUT_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        # the processes that it started are in its session too
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_ready(
    process: "subprocess.Popen[bytes]", target: Target, log: IO[bytes], progress: Callable[[str], None]
) -> None:
    began = time.monotonic()
    while (waited := time.monotonic() - began) < START_TIMEOUT_S:
        if process.poll() is not None:
            raise BackendError(f"the server ended before it was ready: {_last_line(log)}")
        progress(f"the server is starting: {waited:.0f} s")
        response = _get(target, READY)
        if not isinstance(response, str) and response.status == 200:
            return
        time.sleep(POLL_S)
    raise BackendError(f"the server was not ready after {START_TIMEOUT_S:.0f} s: {_last_line(log)}")


def _get(target: Target, path: str) -> Response | str:
    """Return the response, or the reason why there is none."""

    async def get() -> Response:
        client = Client(target)
        try:
            return await client.get(path, RESPONSE_TIMEOUT_S)
        finally:
            await client.close()

    try:
        return asyncio.run(get())
    except (OSError, ClientError, ProtocolError) as err:
        return reason(err, RESPONSE_TIMEOUT_S)


def _free_port() -> int:
    with socket.socket() as held:
        held.bind((HOST, 0))
        return int(held.getsockname()[1])


def _last_line(log: IO[bytes]) -> str:
    """Return the last line of a server's log: the reason why it ended."""
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else "it said nothing."
