"""Follower rank: it loads its shard and runs the steps that rank 0 announces."""

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from auraflux.cache import Cache, CacheSettings
from auraflux.cache.key_calibration import ModelCalibration
from auraflux.distributed.comm.byte_messages import pack_calibration, receive_bytes, send_bytes, unpack_calibration
from auraflux.distributed.comm.collectives import Subgroup
from auraflux.distributed.comm.devices import Devices
from auraflux.distributed.comm.group import JOIN_S, Endpoint, Group, address_towards
from auraflux.distributed.comm.hosts import Hosts
from auraflux.distributed.comm.identity import identity, numeric_environment
from auraflux.distributed.comm.mesh import Mesh
from auraflux.distributed.comm.slow_link import SimulatedLink
from auraflux.distributed.follower_replies import FollowerReplies
from auraflux.distributed.lockstep import LockstepFollowerRunner, LockstepRank
from auraflux.distributed.measure import run_measurement
from auraflux.distributed.parallel import TENSOR, TIMEOUT_S
from auraflux.distributed.pipeline import PipelineRank, PipelineStageModel, StageRunner
from auraflux.distributed.shard import rank_shard
from auraflux.engine.calibrate import calibrate_keys
from auraflux.engine.calibration import sample_weights
from auraflux.engine.device import activation_dtype, find_device
from auraflux.errors import InputError, RankError
from auraflux.loading.memory_budget import open_experts
from auraflux.loading.model_loader import make_model
from auraflux.machine import free_nbytes
from auraflux.models import family
from auraflux.weights.download.pull import locate
from auraflux.weights.experts.settings import ExpertSettings
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.formats.stored import Checkpoint
from auraflux.weights.parallel.expert_placement import Placement

log = logging.getLogger("auraflux")
POLL_S = 0.1  # between two checks for a group to join


def follow(
    host: str,
    port: int,
    model: str | Path,
    *,
    rank: int | None = None,
    timeout_s: float = TIMEOUT_S,
    restart: bool = False,
    link: SimulatedLink | None = None,
) -> None:
    """Join the group at a rendezvous and serve it until rank 0 ends.

    rank     in the group; by default the first unclaimed rank of this machine
    restart  rejoin after the group was lost
    link     simulated network to the other ranks
    """
    checkpoint = open_checkpoint(locate(str(model), lambda what, done, total: None))
    endpoint = Endpoint(host, port, address_towards(host, port))
    number = 0
    while True:
        number, own_rank, about = _join(endpoint, number, rank)
        devices = Devices(**{name: about[name] for name in ("named", "shared", "nccl")})
        device = devices.device_of(own_rank)
        group = Group(endpoint, number, own_rank, about["size"], timeout_s, link)
        try:
            _serve(group, checkpoint, endpoint.address, devices, device)
            return
        except RankError as err:
            if not restart:
                raise
            log.warning("%s Waiting for the group to restart.", err)
        except Exception as err:
            group.report_failure(f"rank {own_rank} failed: {err}")
            raise
        finally:
            group.close()


def _join(endpoint: Endpoint, previous: int, rank: int | None) -> tuple[int, int, dict[str, Any]]:
    """Wait for a group after `previous`; return its number, the rank of this process, and the group's size and devices."""
    store, ends = endpoint.store(JOIN_S), time.monotonic() + JOIN_S
    while (number := store.add("round", 0)) <= previous:
        if time.monotonic() > ends:
            raise RankError(f"no group was formed within {JOIN_S:.0f} s.")
        time.sleep(POLL_S)
    about = json.loads(store.get(f"{number}/about"))
    # without such a device, do not join: another process may
    find_device(about["named"])
    hosts = Hosts(tuple(map(tuple, about.get("addresses", ()))))
    if rank is None and hosts.addresses:
        rank = hosts.claim(store, f"{number}/rank", endpoint.address)
    joined = store.add(f"{number}/joined", 1)
    if rank is None and joined >= about["size"]:
        raise RankError(f"all {about['size']} ranks of the group are taken.")
    return number, joined if rank is None else rank, about


def _serve(group: Group, checkpoint: Checkpoint, address: str, devices: Devices, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    facts = {
        "identity": identity(checkpoint),
        "numeric_environment": numeric_environment(),
        "free": devices.free_nbytes(device),
    }
    group.send_message({**facts, "address": address, "process": os.getpid()}, 0)
    while "measure" in (plan := group.receive_message(0)):
        run_measurement(group, checkpoint, plan)
    if "refused" in plan:
        raise InputError(plan["refused"])
    if "end" in plan:
        return
    mesh = Mesh(**{**plan["mesh"], "modes": tuple(plan["mesh"]["modes"])})
    if devices.nccl:
        group.open_nccl(mesh)
    follower = _load(group, checkpoint, plan, mesh, device)
    group.send_message({"ready": True}, 0)
    try:
        follower.follow()
    finally:
        # NCCL ends only after the graphs with its calls are gone
        follower.graphs.reset()


def _load(
    group: Group, checkpoint: Checkpoint, plan: dict[str, Any], mesh: Mesh, device: torch.device
) -> PipelineRank | LockstepRank:
    """Load this rank's shard and create its KV cache."""
    module = family(checkpoint.config)
    config, dtype = module.Config.from_hf(checkpoint.config), activation_dtype(device)
    settings = ExpertSettings(**plan["experts"])
    placement = Placement(mesh.rank_in_stage(group.rank), mesh.width, plan["owners"])
    shard = rank_shard(mesh, group.rank, lambda: Subgroup(group, mesh.peers(group.rank)), settings.balance == "on", placement)
    shapes, layers = shard.slice_shapes(module.make_caches(config)), range(*plan["layers"][group.rank])
    experts = open_experts(checkpoint, settings, device, free_nbytes(), None if mesh.single_stage else layers)
    weights = checkpoint, plan["quantize"], dtype, device, experts, lambda what, done, total: None
    model = make_model(module, config, *weights, layers, shard)
    calibration = shard.slice_calibration(_calibration(group, mesh, model, shapes, plan, dtype, device))
    local: dict[str, Any] = {"key_calibration": calibration, "local_layers": layers, "page_shard": shard.page_shard}
    cache = Cache(shapes, CacheSettings(**plan["kv"]), **plan["sizes"], **local, dtype=dtype, device=device)
    graphs = plan["graphs"] and (experts is None or experts.plan.mapped)
    read_nbytes: Callable[[], int] = lambda: 0 if experts is None else experts.cache_stats().total.nbytes  # noqa: E731
    arguments = model, cache, plan["exact"], group, mesh
    runner = LockstepFollowerRunner(*arguments) if mesh.single_stage else StageRunner(*arguments)
    runner.invariant = plan["invariant"]
    # tokens of the calibration do not count as usage
    placement.reset_counts()
    replies = FollowerReplies(group, mesh, read_nbytes, placement)
    return (
        LockstepRank(runner, graphs, replies)
        if isinstance(runner, LockstepFollowerRunner)
        else PipelineRank(runner, graphs, replies)
    )


def _calibration(
    group: Group, mesh: Mesh, model: Any, shapes: list[Any], plan: dict[str, Any], dtype: Any, device: Any
) -> ModelCalibration | None:
    """Receive the key calibration from rank 0, or measure it together with all ranks."""
    # one rank per stage sends its layers
    sends = group.rank in mesh.first_ranks[1:]
    if plan["calibrate"] and sends:
        send_bytes(group, sample_weights(model, shapes), 0)
    message = group.receive_message(0)
    if "tokens" in message:
        run = model if mesh.single_stage else PipelineStageModel(model, group, mesh)
        found = calibrate_keys(run, shapes, message["tokens"], dtype, device)
        if sends or TENSOR in mesh.modes:
            send_bytes(group, pack_calibration(found), 0)
        message = group.receive_message(0)
    if "end" in message:
        raise RankError("rank 0 stopped loading.")
    packed = receive_bytes(group, 0)
    return unpack_calibration(packed) if message["calibrated"] else None
