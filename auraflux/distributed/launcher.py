"""`Launcher`: starts follower processes, or waits for those on other machines, and connects them into a group."""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from auraflux.distributed.comm.devices import Devices, under_torchrun
from auraflux.distributed.comm.group import JOIN_S, Endpoint, Group, address_towards, open_rendezvous
from auraflux.distributed.comm.hosts import Hosts
from auraflux.distributed.comm.slow_link import find_link
from auraflux.distributed.parallel import LOCAL, Parallel
from auraflux.errors import RankError

log = logging.getLogger("auraflux")
EXIT_S = 5.0  # for started processes to exit
TRUSTED = (
    "ranks trust each other and their network: connections are neither encrypted nor authenticated. "
    "Use a network that only they can reach."
)


class Launcher:
    """Launcher of the followers of rank 0.

    endpoint   of the rendezvous
    processes  that it started on this machine
    """

    def __init__(self, parallel: Parallel, model: Path, devices: Devices):
        self._parallel, self._model, self._devices = parallel, model, devices
        self._size, self._hosts = parallel.mesh.size, Hosts.named(parallel.hosts)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.endpoint, self._server = self._open_rendezvous()

    def _open_rendezvous(self) -> tuple[Endpoint, Any]:
        if under_torchrun():
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            return Endpoint(host, port, address_towards(host, port)), None
        host, port = self._parallel.rendezvous
        if self._hosts.addresses:
            host = self._hosts.addresses[0][0]
        if host != LOCAL:
            log.warning("%s", TRUSTED)
        return open_rendezvous(host, port)

    def connect(self, unless: Callable[[], bool]) -> Group:
        """Start the followers and wait until all have joined, unless `unless` becomes true."""
        store = self.endpoint.store(self._parallel.timeout_s)
        number = int(store.add("next", 1))
        about = {"size": self._size, **asdict(self._devices), **asdict(self._hosts)}
        store.set(f"{number}/about", json.dumps(about))
        # followers join the group of the current round
        store.set("round", str(number))
        if not under_torchrun() and not self._parallel.hosts:
            self.processes = [self._start() for _ in range(self._size - 1)]
        elif not under_torchrun():
            where = f"{self.endpoint.host}:{self.endpoint.port}"
            log.warning("waiting for %d ranks: run 'auraflux follow %s MODEL' on each", self._size - 1, where)
        self._wait(store, number, unless)
        link = find_link(self._parallel.network)
        return Group(self.endpoint, number, 0, self._size, self._parallel.timeout_s, link)

    def _wait(self, store: Any, number: int, unless: Callable[[], bool]) -> None:
        deadline = time.monotonic() + JOIN_S
        while (joined := store.add(f"{number}/joined", 0)) < self._size - 1:
            ended = next((process.returncode for process in self.processes if process.poll() is not None), None)
            if ended is not None:
                raise RankError(f"a rank ended with code {ended} before it joined; its messages are above.")
            if time.monotonic() > deadline or unless():
                raise RankError(f"only {joined + 1} of {self._size} ranks have joined.")
            time.sleep(0.05)

    def _start(self) -> "subprocess.Popen[bytes]":
        address = f"{self.endpoint.host}:{self.endpoint.port}"
        command = [sys.executable, "-m", "auraflux", "follow", address, str(self._model)]
        command += ["--rank-timeout", str(self._parallel.timeout_s), "--wire", self._parallel.network]
        # a new session: Ctrl-C must not stop followers before rank 0 ends them
        null = subprocess.DEVNULL
        return subprocess.Popen(command, stdin=null, stdout=null, start_new_session=True)

    def wrong_host(self, rank: int, address: str) -> str | None:
        """Return why a rank at this address is on the wrong host; None if it is not."""
        if not self._hosts.addresses or rank in self._hosts.ranks_of(address):
            return None
        return f"it has the address {address}, and its host is {self._hosts.addresses[rank][0]}"

    def stop(self, kill: bool) -> None:
        """Wait for the started processes to exit; kill them at once with `kill`, or after a timeout."""
        for process in self.processes:
            if kill:
                process.kill()
            try:
                process.wait(EXIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes = []
