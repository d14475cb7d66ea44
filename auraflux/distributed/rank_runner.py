"""`RankRunner`: the model runner of one rank, the agreement of ranks on graph capture, and transfers of images' embeddings."""

from collections.abc import Iterable
from typing import Any

import torch

from auraflux.cache import Batch, Cache
from auraflux.cache.step_index import Embeddings
from auraflux.distributed.comm.collectives import Subgroup
from auraflux.distributed.comm.group import Group
from auraflux.distributed.comm.mesh import Mesh
from auraflux.engine.model_runner import ModelRunner

THROUGH_MEMORY = "ranks exchange hidden states within a step, through host memory"
REASON_NBYTES = 200


class RankRunner(ModelRunner):
    """Runner of this rank's shard of a model. Ranks of a stage run, capture or replay every step together.

    All count the same steps, so each knows when a step is captured. They exchange whether the capture succeeded, because a step
    whose NCCL calls only some ranks replay would never end.
    """

    single_rank = False

    def __init__(self, model: Any, cache: Cache, exact: bool, group: Group, mesh: Mesh):
        super().__init__(model, cache, exact)
        self.group, self.mesh = group, mesh

    @property
    def graph_refusal(self) -> str | None:
        """Reason why its steps cannot be captured; None if they can."""
        return None if self.mesh.width == 1 or self.group.capturable else THROUGH_MEMORY

    def agree_on_capture(self, failure: str | None) -> str | None:
        """Return why a rank of the stage did not capture a step; None if all did. `failure` is the reason of this rank."""
        mine = (failure or "").encode()[:REASON_NBYTES].ljust(REASON_NBYTES, b"\0")
        peers = Subgroup(self.group, self.mesh.peers(self.group.rank))
        gathered = peers.all_gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        reasons = (bytes(each.numpy()).rstrip(b"\0").decode(errors="ignore") for each in gathered)
        return next((reason for reason in reasons if reason), None)


def send_step(group: Group, ranks: Iterable[int], message: dict[str, Any], batch: Batch, model: Any) -> None:
    """Announce a step to ranks that embed its tokens, with the embeddings of its images."""
    found = batch.embeddings
    if not isinstance(found, Embeddings):
        for rank in ranks:
            group.send_message(message, rank)
        return
    values = found.values.to("cpu", model.dtype)
    for rank in ranks:
        group.send_message({**message, "embedded": found.rows.tolist()}, rank)
        group.send(values, rank)


def receive_embeddings(group: Group, rows: list[int] | None, model: Any) -> Embeddings | None:
    """Receive the embeddings that follow a message of `send_step`; `rows` are its tokens with embeddings."""
    if rows is None:
        return None
    return Embeddings(torch.tensor(rows), group.receive(len(rows), model.config.hidden, source=0, dtype=model.dtype))
