"""The server that is measured: asked what it is, or started here for the time it takes."""

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

from auraflux.bench.load.answer import Answer, NotHttp
from auraflux.bench.load.client import Client, reason
from auraflux.bench.load.plan import USUAL_VOCAB, Target
from auraflux.errors import BackendError, InputError

COMMAND = [sys.executable, "-m", "auraflux", "serve"]
HOST = "127.0.0.1"
ANSWER_S = 10.0
POLL_S = 0.25
START_S = 1800.0  # for weights that come from a slow disk
STOP_S = 60.0
READY = "/ready"


@dataclass(frozen=True)
class Served:
    """What a server says of itself.

    vocab   None where it does not say
    device  likewise
    """

    model: str
    vocab: int | None = None
    device: str | None = None


def ask_models(target: Target, wanted: str | None = None) -> Served:
    """Which model a server has: the one of that name, or its first."""
    answer = _get(target, "/v1/models")
    if isinstance(answer, str):
        raise BackendError(f"no server answers at {target.url}: {answer}.")
    found = answer.json()
    if answer.status in (401, 403):
        raise InputError(f"the server at {target.url} wants an API key, or another one; give it with --api-key.")
    entries = found.get("data") if answer.status == 200 and isinstance(found, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "id" in entry for entry in entries) or not entries:
        raise BackendError(f"{target.url}/v1/models answers HTTP {answer.status} without a list of models.")
    names = [str(entry["id"]) for entry in entries]
    if wanted is not None and wanted not in names:
        raise InputError(f"the server at {target.url} has no model {wanted!r}. Those it has: {', '.join(names)}.")
    return _served(entries[0 if wanted is None else names.index(wanted)])


def _served(entry: dict[str, Any]) -> Served:
    meta = entry.get("meta")
    # llama-server tells it in its own place
    vocab = entry.get("vocab_size") or (meta.get("n_vocab") if isinstance(meta, dict) else None)
    device = entry.get("device")
    known = isinstance(vocab, int) and vocab > 1
    return Served(str(entry["id"]), vocab if known else None, device if isinstance(device, str) else None)


def usable_vocab(served: Served) -> int:
    return USUAL_VOCAB if served.vocab is None else served.vocab


@contextmanager
def started(words: list[str], api_key: str | None, tell: Callable[[str], None]) -> Iterator[Target]:
    """Run `auraflux serve` with such options on a free port until the block ends."""
    port = _free_port()
    command = [*COMMAND, *words, "--host", HOST, "--port", str(port)]
    target = Target(HOST, port, api_key=api_key)
    with tempfile.TemporaryFile() as log:
        # in a session of its own, so that Ctrl-C is heard here only and ends it in order
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait_until_ready(process, target, log, tell)
            yield target
            if process.poll() is not None:
                raise BackendError(f"the server ended while it was measured: {_last_line(log)}")
        finally:
            stop(process)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Ask a server to end, and make it if it does not."""
    if process.poll() is not None:
        return
    try:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        # with what it started, which has its session too
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_ready(process: "subprocess.Popen[bytes]", target: Target, log: IO[bytes], tell: Callable[[str], None]) -> None:
    began = time.monotonic()
    while (waited := time.monotonic() - began) < START_S:
        if process.poll() is not None:
            raise BackendError(f"the server ended before it was ready: {_last_line(log)}")
        tell(f"the server is starting: {waited:.0f} s")
        answer = _get(target, READY)
        if not isinstance(answer, str) and answer.status == 200:
            return
        time.sleep(POLL_S)
    raise BackendError(f"the server was not ready after {START_S:.0f} s: {_last_line(log)}")


def _get(target: Target, path: str) -> Answer | str:
    """An answer, or why there is none."""

    async def get() -> Answer:
        client = Client(target)
        try:
            return await client.get(path, ANSWER_S)
        finally:
            client.close()
            # the connection is closed by the loop, in its next turn
            await asyncio.sleep(0)

    try:
        return asyncio.run(get())
    except (OSError, NotHttp) as err:
        return reason(err, ANSWER_S)


def _free_port() -> int:
    with socket.socket() as held:
        held.bind((HOST, 0))
        return int(held.getsockname()[1])


def _last_line(log: IO[bytes]) -> str:
    """What a server said last, which is why it ended."""
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else "it said nothing."
