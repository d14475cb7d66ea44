"""Shard of a stage on one rank: some experts, some KV cache pages, or some heads and columns of every layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from auraflux.cache.key_calibration import ModelCalibration
from auraflux.cache.page_shards import UNSHARDED, PageShard
from auraflux.distributed.comm.collectives import Collectives
from auraflux.distributed.comm.mesh import Mesh
from auraflux.distributed.parallel import CONTEXT, EXPERTS, TENSOR
from auraflux.weights.parallel.balanced_experts import ExpertBalancer
from auraflux.weights.parallel.expert_parallel import ExpertSharding
from auraflux.weights.parallel.expert_placement import Placement
from auraflux.weights.parallel.tensor_slices import UNSLICED, Slices


@dataclass(frozen=True)
class RankShard:
    """Shard of every layer on one rank.

    expert_sharding  expert parallelism; None for all experts
    page_shard       context parallelism: pages of every sequence
    slices           tensor parallelism: heads and columns
    """

    expert_sharding: ExpertSharding | None
    page_shard: PageShard
    slices: Slices

    def slice_shapes(self, shapes: list[Any]) -> list[Any]:
        """Return the cache shapes of this rank."""
        return shapes if self.slices.unsliced else [shape.sliced(self.slices.heads) for shape in shapes]

    def slice_calibration(self, calibration: ModelCalibration | None) -> ModelCalibration | None:
        """Return the key calibration of this rank's heads."""
        return calibration if calibration is None or self.slices.unsliced else calibration.sliced(self.slices.heads)


def rank_shard(
    mesh: Mesh, rank: int, peers: Callable[[], Collectives], balanced: bool = False, placement: Placement | None = None
) -> RankShard:
    """Return the shard of a rank.

    peers      returns the current group of its stage, which a restart replaces
    balanced   balance offloaded experts over ranks in every step
    placement  of experts; None for placement by number
    """

    def all_reduce(mine: Tensor) -> Tensor:
        return peers().all_reduce(mine)

    position = mesh.rank_in_stage(rank), mesh.width
    balance = ExpertBalancer(*position, peers) if balanced else None
    return RankShard(
        ExpertSharding(placement or Placement(*position), all_reduce, balance) if EXPERTS in mesh.modes else None,
        PageShard(*position, lambda mine: peers().all_gather(mine)) if CONTEXT in mesh.modes else UNSHARDED,
        Slices(*position, all_reduce) if TENSOR in mesh.modes else UNSLICED,
    )
