"""Rank 0: it forms the group, plans the shards of all ranks, and restarts the group when a rank is lost."""

import atexit
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from auraflux.cache import Cache, CacheSettings
from auraflux.cache.key_calibration import ModelCalibration
from auraflux.cache.page_shards import PageShard
from auraflux.distributed.comm.byte_messages import pack_calibration, receive_bytes, send_bytes, unpack_calibration
from auraflux.distributed.comm.collectives import Subgroup
from auraflux.distributed.comm.devices import Devices
from auraflux.distributed.comm.group import Group
from auraflux.distributed.comm.identity import difference, identity, numeric_difference
from auraflux.distributed.expert_usage import AUTO, ExpertUsage, find_usage, model_name, usage_path
from auraflux.distributed.expert_usage import save as save_usage
from auraflux.distributed.launcher import Launcher
from auraflux.distributed.layer_split import LayerSizes, split_layers
from auraflux.distributed.lockstep import LockstepRunner
from auraflux.distributed.measure import RankMeasurement, measure
from auraflux.distributed.parallel import EXPERTS, TENSOR, Parallel
from auraflux.distributed.pipeline import MeshRunner, PipelineRunner, PipelineStageModel
from auraflux.distributed.shard import RankShard, rank_shard
from auraflux.engine.model_runner import ModelRunner
from auraflux.errors import InputError, RankError, SettingsError
from auraflux.progress import Report
from auraflux.weights.formats.stored import Checkpoint
from auraflux.weights.parallel.expert_placement import Placement, PlacementResult, rebalance


class Leader:
    """The group of ranks, as seen by rank 0.

    layers            of each rank
    memory            free bytes of each rank
    addresses         of each rank
    numeric_mismatch  reason why ranks may round differently; None if they do not
    balanced          offloaded experts are balanced over ranks in every step
    placement         of experts on ranks
    notes             remarks for the user
    launcher          of the follower processes
    """

    def __init__(self, parallel: Parallel, checkpoint: Checkpoint, device: torch.device):
        self.parallel, self.mesh, self._checkpoint = parallel, parallel.mesh, checkpoint
        self._devices = Devices.of(parallel, device)
        self._free = self._devices.free_nbytes(device)
        self._identity = identity(checkpoint)
        self._name, self.placement = model_name(self._identity), Placement(0, self.mesh.width)
        self._uses = find_usage(parallel.expert_counts, self._name) if EXPERTS in self.mesh.modes else {}
        self._plan: dict[str, Any] = {}
        self._calibration: ModelCalibration | None = None
        self._runner: PipelineRunner | LockstepRunner | None = None
        self._serving = self.balanced = False
        self.notes: list[str] = []
        self.launcher = Launcher(parallel, checkpoint.path, self._devices)
        try:
            self.group = self._form_group()
        except BaseException:
            self.launcher.stop(kill=True)
            raise
        atexit.register(self.close)

    def __enter__(self) -> "Leader":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _form_group(self, unless: Callable[[], bool] = lambda: False) -> Group:
        """Connect all ranks and check that they have the same model."""
        group = self.launcher.connect(unless)
        found = [group.receive_message(rank) for rank in range(1, self.mesh.size)]
        for rank, each in enumerate(found, 1):
            reason = difference(self._identity, each["identity"]) or self.launcher.wrong_host(rank, each["address"])
            reason = reason or (numeric_difference([each["numeric_environment"]]) if self.balanced else None)
            if reason is not None:
                group.broadcast_message({"refused": f"rank {rank} cannot join: {reason}."})
                raise InputError(f"rank {rank} cannot join: {reason}.")
        self.memory = [self._free, *(each["free"] for each in found)]
        self.addresses = [self.launcher.endpoint.address, *(each["address"] for each in found)]
        self.numeric_mismatch = numeric_difference([each["numeric_environment"] for each in found])
        return group

    @property
    def local_layers(self) -> range:
        """Layers of rank 0."""
        return self.layers[0]

    @property
    def single_stage(self) -> bool:
        """True if every rank has all layers."""
        return self.mesh.single_stage

    def shard(self, rank: int = 0) -> RankShard:
        """Return the shard of a rank."""
        placement = self.placement if rank == 0 else None
        return rank_shard(
            self.mesh, rank, lambda: Subgroup(self.group, self.mesh.peers(self.group.rank)), self.balanced, placement
        )

    @property
    def page_shard(self) -> PageShard:
        """Pages of every sequence that rank 0 stores."""
        return self.shard().page_shard

    def sliced(self, shapes: list[Any]) -> list[Any]:
        """Return the cache shapes of rank 0."""
        return self.shard().slice_shapes(shapes)

    def assign_layers(self, sizes: LayerSizes, shapes: list[Any]) -> list[tuple[range, int, list[Any]]]:
        """Assign layers to ranks; return the layers, the free memory and the cache shapes of each rank."""
        mesh = self.mesh
        # ranks of a stage have shards of equal size
        stages = split_layers(sizes, [min(self.memory[rank] for rank in mesh.peers(first)) for first in mesh.first_ranks])
        self.layers = [stages[mesh.stage(rank)] for rank in range(mesh.size)]
        sliced = [self.shard(rank).slice_shapes(shapes) for rank in range(mesh.size)]
        return list(zip(self.layers, self.memory, sliced, strict=True))

    def start_loading(self, settings: CacheSettings, experts: Any, **options: Any) -> None:
        """Send the load plan to all ranks."""
        layers = [[each.start, each.stop] for each in self.layers]
        shared = {"mesh": asdict(self.mesh), "layers": layers, "kv": asdict(settings), "experts": asdict(experts)}
        self._plan = {**shared, **options}
        if not self.balanced:
            self.placement.owners, result = rebalance(self._uses, {}, self.mesh.width)
            if result.moved:
                load = f"{result.after:.1%} of a layer's rows, instead of {result.before:.1%}"
                self.notes.append(f"experts: placed by usage, the busiest of {self.mesh.width} ranks runs {load}.")
        self.group.broadcast_message({**self._plan, "owners": self.placement.owners})
        self._open_devices()

    def _open_devices(self) -> None:
        if self._devices.nccl:
            self.group.open_nccl(self.mesh)

    def gather(self, mine: bytes) -> list[bytes]:
        """Gather bytes from the first rank of every stage, in stage order."""
        return [mine, *(receive_bytes(self.group, rank) for rank in self._with_other_layers)]

    @property
    def _with_other_layers(self) -> range:
        return self.mesh.first_ranks[1:]

    def broadcast_tokens(self, tokens: list[int]) -> None:
        """Start a calibration run with these tokens on all ranks."""
        self.group.broadcast_message({"tokens": tokens})

    def merge(self, mine: ModelCalibration) -> ModelCalibration:
        """Merge the key calibration of all ranks, in host memory."""
        mine = unpack_calibration(pack_calibration(mine))
        if TENSOR in self.mesh.modes:
            others = [unpack_calibration(receive_bytes(self.group, rank)) for rank in range(1, self.group.size)]
            return ModelCalibration.joined([mine, *others])
        found = dict(mine.layers)
        for rank in self._with_other_layers:
            found |= unpack_calibration(receive_bytes(self.group, rank)).layers
        return ModelCalibration(dict(sorted(found.items())))

    def calibration_model(self, model: Any) -> Any:
        """Return the model that a calibration runs: this stage, connected to its neighbours."""
        return model if self.single_stage else PipelineStageModel(model, self.group, self.mesh)

    def runner(self, model: Any, cache: Cache, exact: bool) -> ModelRunner:
        """Return the runner of the complete model."""
        arguments = model, cache, exact, self.group, self.mesh
        if self.single_stage:
            self._runner = LockstepRunner(*arguments)
        else:
            kind = PipelineRunner if self.mesh.width == 1 else MeshRunner
            self._runner = kind(*arguments, self._plan["graphs"])
        return self._runner

    def finish_loading(self, calibration: ModelCalibration | None) -> None:
        """Send the key calibration to all ranks and wait until they have loaded."""
        self._calibration = calibration
        packed = b"" if calibration is None else pack_calibration(calibration)
        self.group.broadcast_message({"calibrated": calibration is not None})
        for rank in range(1, self.group.size):
            send_bytes(self.group, packed, rank)
        for rank in range(1, self.group.size):
            self.group.receive_message(rank)
        # tokens of the calibration do not count as usage
        self.placement.reset_counts()
        self._serving = True

    def read_nbytes(self) -> int:
        """Return the bytes of experts that the followers have read."""
        return sum(each["nbytes"] for each in self.follower_stats())

    def follower_stats(self) -> list[dict[str, Any]]:
        """Return, for each follower, the bytes of experts it has read and why it does not replay decode steps, if any."""
        self._notify({"read": True})
        return [self.group.receive_message(rank) for rank in range(1, self.group.size)]

    def place_experts(self) -> PlacementResult:
        """Place experts by how often each was chosen since the last placement; called between two steps."""
        if EXPERTS not in self.mesh.modes:
            raise SettingsError(f"{self.parallel} has no expert parallelism, so experts cannot be placed.")
        if self.balanced:
            raise SettingsError("offloaded experts are balanced in every step and have no fixed placement.")
        uses, width = self._counted(), self.mesh.width
        if not any(map(any, uses.values())):
            raise InputError("no tokens were processed since the last placement, so there is no expert usage yet.")
        owners, result = rebalance(uses, self.placement.owners, width)
        self._notify({"owners": owners})
        try:
            self.placement.apply(owners)
            for rank in range(1, self.group.size):
                if "failed" in (reply := self.group.receive_message(rank)):
                    raise RankError(f"rank {rank} could not load its experts: {reply['failed']}")
        except BaseException as err:
            self.group.abort(str(err) or "the placement of experts was interrupted.")
            raise
        if self.parallel.expert_counts == AUTO:
            save_usage(usage_path(self._name), self._name, uses)
        return result

    def _counted(self) -> ExpertUsage:
        """Return the expert usage of all layers."""
        if not self.single_stage:
            self._notify({"uses": True})
        others = [self.group.receive_message(rank)["uses"] for rank in self._with_other_layers]
        return {name: uses for stage in (self.placement.uses(), *others) for name, uses in stage.items()}

    def measure(self, report: Report) -> list[RankMeasurement]:
        """Measure memory, disk and network of all ranks, before loading."""
        return measure(self.group, self._checkpoint, self.addresses, self.memory, report)

    def check(self) -> None:
        """Raise if a rank is lost."""
        self.group.check()

    def restart(self, unless: Callable[[], bool]) -> None:
        """Restart the group with empty caches; the caller has closed all sequences."""
        assert self._runner is not None
        self._end()
        self._serving = False
        self.group = self._form_group(unless)
        self.group.broadcast_message({**self._plan, "calibrate": False, "owners": self.placement.owners})
        self._open_devices()
        self.finish_loading(self._calibration)
        self._runner.rejoin(self.group)

    def close(self) -> None:
        """End the followers."""
        atexit.unregister(self.close)
        if self.group.lost is None:
            with suppress(RankError):
                (self._notify if self._serving else self.group.broadcast_message)({"end": True})
        self._end()

    def _notify(self, message: dict[str, Any]) -> None:
        """Send a message to serving followers; stages pass it on."""
        for rank in (*self.mesh.peers(0)[1:], *self.mesh.first_ranks[1:2]):
            self.group.send_message(message, rank)

    def _end(self) -> None:
        lost = self.group.lost is not None
        if self._runner is not None:
            # NCCL ends only after the graphs with its calls are gone
            self._runner.reset_graphs()
        self.group.close()
        self.launcher.stop(kill=lost)
