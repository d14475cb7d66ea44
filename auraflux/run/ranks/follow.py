"""A rank that follows: it loads what rank 0 tells it to, and takes the steps that rank 0 takes."""

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from auraflux.cache import Cache, CacheSettings
from auraflux.cache.calibration import ModelVectors
from auraflux.errors import InputError, RankError
from auraflux.machine import free_nbytes
from auraflux.models import family
from auraflux.run.calibrate import find_vectors
from auraflux.run.calibration import samples
from auraflux.run.device import activation_dtype, find_device
from auraflux.run.fit import keep_experts
from auraflux.run.loading import make_model
from auraflux.run.ranks.answers import Answers
from auraflux.run.ranks.devices import Devices
from auraflux.run.ranks.group import JOIN_S, Group, Place, address_towards
from auraflux.run.ranks.hosts import Hosts
from auraflux.run.ranks.identity import identity, rounding
from auraflux.run.ranks.measure import answer
from auraflux.run.ranks.members import Part
from auraflux.run.ranks.mesh import Mesh
from auraflux.run.ranks.parallel import TENSOR, TIMEOUT_S
from auraflux.run.ranks.pipeline import Passing, Stage, StageRunner
from auraflux.run.ranks.share import share_of
from auraflux.run.ranks.vectors import collected, pack_vectors, send_bytes, unpack_vectors
from auraflux.run.ranks.whole import FollowingRunner, WholeRank
from auraflux.run.ranks.wire import Wire
from auraflux.weights.checkpoint import open_checkpoint
from auraflux.weights.expert_settings import ExpertSettings
from auraflux.weights.placement import Placement
from auraflux.weights.pull import locate
from auraflux.weights.stored import Checkpoint

log = logging.getLogger("auraflux")
LOOK_S = 0.1  # between two looks for a group that can be joined


def follow(
    host: str,
    port: int,
    model: str | Path,
    *,
    rank: int | None = None,
    timeout_s: float = TIMEOUT_S,
    restart: bool = False,
    wire: Wire | None = None,
) -> None:
    """Take part in the group that meets at an address, until its rank 0 ends.

    rank     in the group; by default the first of this machine's that is free, and of a machine's own processes any
    restart  join again when the group was lost
    """
    checkpoint = open_checkpoint(locate(str(model), lambda what, done, total: None))
    place = Place(host, port, address_towards(host, port))
    number = 0
    while True:
        number, given, about = _join(place, number, rank)
        devices = Devices(**{name: about[name] for name in ("named", "shared", "nccl")})
        device = devices.own(given)
        group = Group(place, number, given, about["size"], timeout_s, wire)
        try:
            _take_part(group, checkpoint, place.address, devices, device)
            return
        except RankError as err:
            if not restart:
                raise
            log.warning("%s Waiting for the group to come back.", err)
        except Exception as err:
            group.fail(f"rank {given} failed: {err}")
            raise
        finally:
            group.close()


def _join(place: Place, before: int, rank: int | None) -> tuple[int, int, dict[str, Any]]:
    """Wait for a group after the one before: its number, this process's rank, and how many there are, and where."""
    store, ends = place.store(JOIN_S), time.monotonic() + JOIN_S
    while (number := store.add("round", 0)) <= before:
        if time.monotonic() > ends:
            raise RankError(f"no group was opened within {JOIN_S:.0f} s.")
        time.sleep(LOOK_S)
    about = json.loads(store.get(f"{number}/about"))
    # who has no such device leaves the others waiting for another
    find_device(about["named"])
    hosts = Hosts(tuple(map(tuple, about.get("addresses", ()))))
    if rank is None and hosts.addresses:
        rank = hosts.claim(store, f"{number}/rank", place.address)
    joined = store.add(f"{number}/joined", 1)
    if rank is None and joined >= about["size"]:
        raise RankError(f"the group has all of its {about['size']} ranks already.")
    return number, joined if rank is None else rank, about


def _take_part(group: Group, checkpoint: Checkpoint, address: str, devices: Devices, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    here = {"identity": identity(checkpoint), "rounding": rounding(), "free": devices.free_nbytes(device)}
    group.say({**here, "address": address, "process": os.getpid()}, 0)
    while "measure" in (terms := group.hear(0)):
        answer(group, checkpoint, terms)
    if "refused" in terms:
        raise InputError(terms["refused"])
    if "end" in terms:
        return
    mesh = Mesh(**{**terms["mesh"], "modes": tuple(terms["mesh"]["modes"])})
    if devices.nccl:
        group.open_devices(mesh)
    stage = _loaded(group, checkpoint, terms, mesh, device)
    group.say({"ready": True}, 0)
    try:
        stage.follow()
    finally:
        # NCCL is given up when no recording refers to it any more
        stage.replayer.forget()


def _loaded(group: Group, checkpoint: Checkpoint, terms: dict[str, Any], mesh: Mesh, device: torch.device) -> Stage | WholeRank:
    """Load this rank's part and make its cache."""
    module = family(checkpoint.config)
    config, dtype = module.Config.from_hf(checkpoint.config), activation_dtype(device)
    kept = ExpertSettings(**terms["experts"])
    placement = Placement(mesh.place(group.rank), mesh.width, terms["owners"])
    own = share_of(mesh, group.rank, lambda: Part(group, mesh.peers(group.rank)), kept.balance == "on", placement)
    shapes, held = own.sliced(module.make_caches(config)), range(*terms["held"][group.rank])
    experts = keep_experts(checkpoint, kept, device, free_nbytes(), None if mesh.whole else held)
    weights = checkpoint, terms["quantize"], dtype, device, experts, lambda what, done, total: None
    model = make_model(module, config, *weights, held, own)
    vectors = own.vectors(_vectors(group, mesh, model, shapes, terms, dtype, device))
    here: dict[str, Any] = {"vectors": vectors, "held": held, "deal": own.deal, "dtype": dtype, "device": device}
    cache = Cache(shapes, CacheSettings(**terms["kv"]), **terms["sizes"], **here)
    graphs = terms["graphs"] and (experts is None or experts.share.mapped)
    read: Callable[[], int] = lambda: 0 if experts is None else experts.traffic().total.nbytes  # noqa: E731
    whole = model, cache, terms["exact"], group, mesh
    runner = FollowingRunner(*whole) if mesh.whole else StageRunner(*whole)
    runner.invariant = terms["invariant"]
    # a calibration's tokens tell nothing of texts
    placement.begin_count()
    answers = Answers(group, mesh, read, placement)
    return WholeRank(runner, graphs, answers) if isinstance(runner, FollowingRunner) else Stage(runner, graphs, answers)


def _vectors(
    group: Group, mesh: Mesh, model: Any, shapes: list[Any], terms: dict[str, Any], dtype: Any, device: Any
) -> ModelVectors | None:
    """What rank 0 knows of keys, or finds out with the help of all; it needs to be told nothing of keys that it has too."""
    # of ranks with the same layers, one tells
    tells = group.rank in mesh.heads[1:]
    if terms["calibrate"] and tells:
        send_bytes(group, samples(model, shapes), 0)
    told = group.hear(0)
    if "tokens" in told:
        run = model if mesh.whole else Passing(model, group, mesh)
        found = find_vectors(run, shapes, told["tokens"], dtype, device)
        if tells or TENSOR in mesh.modes:
            send_bytes(group, pack_vectors(found), 0)
        told = group.hear(0)
    if "end" in told:
        raise RankError("rank 0 has given up.")
    packed = collected(group, 0)
    return unpack_vectors(packed) if told["vectors"] else None
