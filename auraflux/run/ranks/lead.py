"""Rank 0: it calls the others together, says who does what, and gets them back when one is gone."""

import atexit
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from auraflux.cache import Cache, CacheSettings
from auraflux.cache.calibration import ModelVectors
from auraflux.cache.deal import Deal
from auraflux.errors import InputError, RankError, SettingsError
from auraflux.run.progress import Report
from auraflux.run.ranks.devices import Devices, launched
from auraflux.run.ranks.group import JOIN_S, Group, Place, address_towards, meeting_place
from auraflux.run.ranks.hosts import Hosts
from auraflux.run.ranks.identity import difference, identity, rounding
from auraflux.run.ranks.measure import Measured, measure
from auraflux.run.ranks.members import Part
from auraflux.run.ranks.parallel import EXPERTS, LOCAL, TENSOR, Parallel
from auraflux.run.ranks.pipeline import MeshRunner, Passing, PipelineRunner
from auraflux.run.ranks.share import Share, share_of
from auraflux.run.ranks.split import Sizes, split
from auraflux.run.ranks.use import AUTO, Uses, find_uses, kept_at, model_name
from auraflux.run.ranks.use import keep as keep_uses
from auraflux.run.ranks.vectors import collected, pack_vectors, send_bytes, unpack_vectors
from auraflux.run.ranks.whole import WholeRunner
from auraflux.run.ranks.wire import find_wire
from auraflux.run.runner import Runner
from auraflux.weights.placement import Dealt, Placement, deal_all
from auraflux.weights.stored import Checkpoint

log = logging.getLogger("auraflux")
END_S = 5.0  # in which processes that were started here must end
TRUSTED = (
    "ranks trust each other and everybody on their network: nothing between them is encrypted or asks for a key. "
    "Use a network that only they are on."
)


class Lead:
    """A group with its followers, as rank 0 has it.

    held      layers of each rank
    memory    that is free on each
    addresses where each is
    unequal   why ranks round differently; None if they do not
    balanced  whether experts are dealt out as they are chosen
    placement of experts that each rank has of its own
    notes     what a user should know of it
    """

    def __init__(self, parallel: Parallel, checkpoint: Checkpoint, device: torch.device):
        self.parallel, self.mesh, self._checkpoint = parallel, parallel.mesh, checkpoint
        self._devices = Devices.of(parallel, device)
        self._hosts = Hosts.named(parallel.hosts)
        self._free = self._devices.free_nbytes(device)
        self._identity = identity(checkpoint)
        self._name, self.placement = model_name(self._identity), Placement(0, self.mesh.width)
        self._uses = find_uses(parallel.expert_use, self._name) if EXPERTS in self.mesh.modes else {}
        self._started: list[subprocess.Popen[bytes]] = []
        self._terms: dict[str, Any] = {}
        self._vectors: ModelVectors | None = None
        self._runner: PipelineRunner | WholeRunner | None = None
        self._serving = self.balanced = False
        self.notes: list[str] = []
        self.place, self._server = self._meet()
        try:
            self.group = self._call()
        except BaseException:
            self._stop_started(gone=True)
            raise
        atexit.register(self.close)

    def __enter__(self) -> "Lead":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _meet(self) -> tuple[Place, Any]:
        if launched():
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            return Place(host, port, address_towards(host, port)), None
        host, port = self.parallel.meeting
        if self._hosts.addresses:
            host = self._hosts.addresses[0][0]
        if host != LOCAL:
            log.warning("%s", TRUSTED)
        return meeting_place(host, port)

    def _call(self, unless: Callable[[], bool] = lambda: False) -> Group:
        """Wait until all ranks are there, and make sure that they have the same model."""
        parallel = self.parallel
        # an open group is one that followers may join
        store = self.place.store(parallel.timeout_s)
        number = int(store.add("next", 1))
        about = {"size": self.mesh.size, **asdict(self._devices), **asdict(self._hosts)}
        store.set(f"{number}/about", json.dumps(about))
        store.set("round", str(number))
        if not launched() and not parallel.hosts:
            self._started = [self._start() for _ in range(self.mesh.size - 1)]
        elif not launched():
            where = f"{self.place.host}:{self.place.port}"
            log.warning("waiting for %d ranks: run 'auraflux follow %s MODEL' on each", self.mesh.size - 1, where)
        self._wait_for_all(store, number, unless)
        group = Group(self.place, number, 0, self.mesh.size, parallel.timeout_s, find_wire(parallel.wire))
        found = [group.hear(rank) for rank in range(1, self.mesh.size)]
        for rank, each in enumerate(found, 1):
            reason = difference(self._identity, each["identity"]) or self._strange(rank, each["address"])
            reason = reason or (self.unlike([each["rounding"]]) if self.balanced else None)
            if reason is not None:
                group.say_all({"refused": f"rank {rank} cannot take part: {reason}."})
                raise InputError(f"rank {rank} cannot take part: {reason}.")
        self.memory = [self._free, *(each["free"] for each in found)]
        self.addresses = [self.place.address, *(each["address"] for each in found)]
        self.unequal = self.unlike([each["rounding"] for each in found])
        return group

    @staticmethod
    def unlike(others: list[dict[str, Any]]) -> str | None:
        """Say what another rank rounds differently by; None if all have the same."""
        mine = rounding()
        return next(
            (
                f"its {name} is {each[name]}, and rank 0's {mine[name]}"
                for each in others
                for name in mine
                if each[name] != mine[name]
            ),
            None,
        )

    def _wait_for_all(self, store: Any, number: int, unless: Callable[[], bool]) -> None:
        ends = time.monotonic() + JOIN_S
        while (there := store.add(f"{number}/joined", 0)) < self.mesh.size - 1:
            ended = next((process.returncode for process in self._started if process.poll() is not None), None)
            if ended is not None:
                raise RankError(f"a rank ended with code {ended} before it began; what it said is above.")
            if time.monotonic() > ends or unless():
                raise RankError(f"only {there + 1} of {self.mesh.size} ranks have come.")
            time.sleep(0.05)

    def _strange(self, rank: int, address: str) -> str | None:
        if not self._hosts.addresses or rank in self._hosts.ranks_of(address):
            return None
        return f"it is at {address}, and this rank is to be at {self._hosts.addresses[rank][0]}"

    def _start(self) -> "subprocess.Popen[bytes]":
        address = f"{self.place.host}:{self.place.port}"
        command = [sys.executable, "-m", "auraflux", "follow", address, str(self._checkpoint.path)]
        command += ["--rank-timeout", str(self.parallel.timeout_s), "--wire", self.parallel.wire]
        # what stops this process must not stop them before they are told
        null = subprocess.DEVNULL
        return subprocess.Popen(command, stdin=null, stdout=null, start_new_session=True)

    @property
    def here(self) -> range:
        """The layers of rank 0."""
        return self.held[0]

    @property
    def whole(self) -> bool:
        """Whether every rank has all layers."""
        return self.mesh.whole

    def own(self, rank: int = 0) -> Share:
        """What a rank has of every layer."""
        placement = self.placement if rank == 0 else None
        return share_of(self.mesh, rank, lambda: Part(self.group, self.mesh.peers(self.group.rank)), self.balanced, placement)

    @property
    def deal(self) -> Deal:
        """Which pages of every sequence rank 0 has."""
        return self.own().deal

    def sliced(self, shapes: list[Any]) -> list[Any]:
        """The shapes of what layers keep on rank 0."""
        return self.own().sliced(shapes)

    def share(self, sizes: Sizes, shapes: list[Any]) -> list[tuple[range, int, list[Any]]]:
        """Decide who has which layers: these, the memory that is free beside them, and the shapes of what they keep."""
        mesh = self.mesh
        # ranks of a stage have as much as each other
        stages = split(sizes, [min(self.memory[rank] for rank in mesh.peers(head)) for head in mesh.heads])
        self.held = [stages[mesh.stage(rank)] for rank in range(mesh.size)]
        kept = [self.own(rank).sliced(shapes) for rank in range(mesh.size)]
        return list(zip(self.held, self.memory, kept, strict=True))

    def agree(self, settings: CacheSettings, experts: Any, **terms: Any) -> None:
        """Tell the others what to load, and how."""
        held = [[each.start, each.stop] for each in self.held]
        self._terms = {"mesh": asdict(self.mesh), "held": held, "kv": asdict(settings), "experts": asdict(experts), **terms}
        if not self.balanced:
            self.placement.owners, dealt = deal_all(self._uses, {}, self.mesh.width)
            if dealt.moved:
                parts = f"{dealt.after:.1%} of a layer's rows, and {dealt.before:.1%} if by number"
                self.notes.append(f"experts: dealt out by use, the busiest of {self.mesh.width} ranks has {parts}.")
        self.group.say_all({**self._terms, "owners": self.placement.owners})
        self._open_devices()

    def _open_devices(self) -> None:
        if self._devices.nccl:
            self.group.open_devices(self.mesh)

    def gather(self, mine: bytes) -> list[bytes]:
        """What all ranks have, in their order."""
        return [mine, *(collected(self.group, rank) for rank in self._with_other_layers)]

    @property
    def _with_other_layers(self) -> range:
        return self.mesh.heads[1:]

    def begin(self, tokens: list[int]) -> None:
        """Have all ranks run tokens for a calibration, when this one does."""
        self.group.say_all({"tokens": tokens})

    def join(self, mine: ModelVectors) -> ModelVectors:
        """The vectors that all ranks have found, in main memory."""
        mine = unpack_vectors(pack_vectors(mine))
        if TENSOR in self.mesh.modes:
            others = [unpack_vectors(collected(self.group, rank)) for rank in range(1, self.group.size)]
            return ModelVectors.joined([mine, *others])
        found = dict(mine.layers)
        for rank in self._with_other_layers:
            found |= unpack_vectors(collected(self.group, rank)).layers
        return ModelVectors(dict(sorted(found.items())))

    def passing(self, model: Any) -> Any:
        """What a calibration runs."""
        return model if self.whole else Passing(model, self.group, self.mesh)

    def runner(self, model: Any, cache: Cache, exact: bool) -> Runner:
        """What runs all layers."""
        parts = model, cache, exact, self.group, self.mesh
        if self.whole:
            self._runner = WholeRunner(*parts)
        else:
            kind = PipelineRunner if self.mesh.width == 1 else MeshRunner
            self._runner = kind(*parts, self._terms["graphs"])
        return self._runner

    def ready(self, vectors: ModelVectors | None) -> None:
        """Give the others what is known of keys, and wait until they have loaded their layers."""
        self._vectors = vectors
        packed = b"" if vectors is None else pack_vectors(vectors)
        self.group.say_all({"vectors": vectors is not None})
        for rank in range(1, self.group.size):
            send_bytes(self.group, packed, rank)
        for rank in range(1, self.group.size):
            self.group.hear(rank)
        # a calibration's tokens tell nothing of texts
        self.placement.begin_count()
        self._serving = True

    def read_nbytes(self) -> int:
        """How much of experts the other ranks have read so far."""
        return sum(each["nbytes"] for each in self.ask())

    def ask(self) -> list[dict[str, Any]]:
        """What each of the other ranks has read of experts, and why it does not replay steps of decoding, if it does not."""
        self._tell({"read": True})
        return [self.group.hear(rank) for rank in range(1, self.group.size)]

    def deal_experts(self) -> Dealt:
        """Deal experts out by how often each was chosen since that was done last; between two steps, by who takes them."""
        if EXPERTS not in self.mesh.modes:
            raise SettingsError(f"{self.parallel} does not divide experts, so that they cannot be dealt out again.")
        if self.balanced:
            raise SettingsError("experts that are read from disk are dealt out evenly whenever they are chosen.")
        uses, width = self._counted(), self.mesh.width
        if not any(map(any, uses.values())):
            raise InputError("no token has chosen an expert since experts were dealt out: there is nothing to go by yet.")
        owners, dealt = deal_all(uses, self.placement.owners, width)
        self._tell({"owners": owners})
        try:
            self.placement.take(owners)
            for rank in range(1, self.group.size):
                if "failed" in (told := self.group.hear(rank)):
                    raise RankError(f"rank {rank} could not get the experts that it was dealt: {told['failed']}")
        except BaseException as err:
            self.group.break_up(str(err) or "experts were being dealt out, and that was broken off.")
            raise
        if self.parallel.expert_use == AUTO:
            keep_uses(kept_at(self._name), self._name, uses)
        return dealt

    def _counted(self) -> Uses:
        """How often experts of all layers were chosen."""
        if not self.whole:
            self._tell({"uses": True})
        others = [self.group.hear(rank)["uses"] for rank in self._with_other_layers]
        return {name: uses for stage in (self.placement.uses(), *others) for name, uses in stage.items()}

    def measure(self, report: Report) -> list[Measured]:
        """Measure what all ranks and their links give, before anything is agreed on."""
        return measure(self.group, self._checkpoint, self.addresses, self.memory, report)

    def check(self) -> None:
        """Raise if a rank is gone."""
        self.group.check()

    def restart(self, unless: Callable[[], bool]) -> None:
        """Bring the group back with an empty cache; whoever calls has closed all sequences."""
        assert self._runner is not None
        self._end()
        self._serving = False
        self.group = self._call(unless)
        self.group.say_all({**self._terms, "calibrate": False, "owners": self.placement.owners})
        self._open_devices()
        self.ready(self._vectors)
        self._runner.renew(self.group)

    def close(self) -> None:
        """End the others."""
        atexit.unregister(self.close)
        if self.group.lost is None:
            with suppress(RankError):
                (self._tell if self._serving else self.group.say_all)({"end": True})
        self._end()

    def _tell(self, told: dict[str, Any]) -> None:
        """Tell ranks that are at work: a note goes from stage to stage."""
        for rank in (*self.mesh.peers(0)[1:], *self.mesh.heads[1:2]):
            self.group.say(told, rank)

    def _end(self) -> None:
        gone = self.group.lost is not None
        if self._runner is not None:
            # NCCL is given up when no recording refers to it any more
            self._runner.forget()
        self.group.close()
        self._stop_started(gone)

    def _stop_started(self, gone: bool) -> None:
        for process in self._started:
            if gone:
                process.kill()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._started = []
