"""Lockstep: all ranks have all layers and run every step together, with collectives inside each layer.

Expert parallel ranks hold some experts of every layer and all-reduce the results: two machines read from two disks and cache
twice as many experts. Context parallel ranks hold some pages of every sequence and merge partial attention: two machines hold a
context that fits neither. Tensor parallel ranks hold some heads and columns of every layer, for GPUs of one machine. All other
computation is replicated.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import Batch, Cache
from auraflux.cache.replication import CacheReplica, ReplicationLog, batch_facts
from auraflux.distributed.comm.group import Group
from auraflux.distributed.comm.mesh import Mesh
from auraflux.distributed.follower_replies import FollowerReplies
from auraflux.distributed.rank_runner import RankRunner, receive_embeddings, send_step
from auraflux.engine.device import to_device
from auraflux.engine.graph_runner import GraphRunner


class LockstepRunner(RankRunner):
    """Runner of rank 0, which announces every step to the others."""

    def __init__(self, model: Any, cache: Cache, exact: bool, group: Group, mesh: Mesh):
        super().__init__(model, cache, exact, group, mesh)
        self.replication_log = ReplicationLog(cache)

    def forward(self, flat: Tensor, batch: Batch) -> Tensor:
        """Run tokens that have cache slots; return the final hidden states that need logits, [N, H]."""
        with self._announced(flat, batch, replayed=False):
            return super().forward(flat, batch)

    def announce_step(self, ids: Tensor, batch: Batch) -> AbstractContextManager[None]:
        """Announce a step that is replayed inside the block."""
        return self._announced(ids, batch, replayed=True)

    @contextmanager
    def _announced(self, ids: Tensor, batch: Batch, replayed: bool) -> Iterator[None]:
        self.group.check()
        try:
            changes = {"replication_log": self.replication_log.take(), "batch": batch_facts(batch)}
            message = {**changes, "ids": ids.tolist(), "replayed": replayed}
            send_step(self.group, range(1, self.group.size), message, batch, self.model)
            yield
        except BaseException:
            # the others wait inside the step and cannot be interrupted
            self.group.abort("a step was interrupted, and the ranks are out of step.")
            raise

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, V] float32."""
        return self._checked(super().compute_logits(hidden))

    def run_captured(self, given: Tensor, batch: Batch) -> Tensor:
        """Run the capturable part of an announced decode step: logits [B, V]."""
        return super().compute_logits(super().forward(given, batch))

    def finish_step(self, found: Tensor, batch: Batch) -> Tensor:
        """Return the logits of a replayed step."""
        return self._checked(found)

    def _checked(self, logits: Tensor) -> Tensor:
        if logits.is_cuda:
            # after an abort of NCCL, a GPU continues with garbage
            torch.cuda.synchronize(logits.device)
            self.group.check()
        return logits

    def rejoin(self, group: Group) -> None:
        """Continue with a restarted group, whose caches are empty."""
        self.group = group
        self.replication_log.take()


class LockstepFollowerRunner(RankRunner):
    """Runner of a follower, which computes no logits."""

    def run_captured(self, given: Tensor, batch: Batch) -> Tensor:
        """Run a step: final hidden states [T, H]."""
        return self.forward(given, batch)


class LockstepRank:
    """Follower that runs the steps of rank 0 and replies to its requests."""

    def __init__(self, runner: LockstepFollowerRunner, graphs: bool, replies: FollowerReplies):
        self.runner, self.group, self._replies = runner, runner.group, replies
        self.replica, self.graphs = CacheReplica(runner.cache), GraphRunner(runner, graphs)

    def follow(self) -> None:
        """Run steps until rank 0 ends."""
        for message in self.group.messages(0):
            if "end" in message:
                return
            if "batch" not in message:
                self._replies.reply(message, self.graphs.refused)
                continue
            self.replica.apply(message["replication_log"])
            ids, batch = to_device(message["ids"], self.runner.device), self.replica.batch(message["batch"])
            batch.embeddings = receive_embeddings(self.group, message.get("embedded"), self.runner.model)
            (self.graphs.replay if message["replayed"] else self._forward)(batch, ids)

    def _forward(self, batch: Batch, ids: Tensor) -> None:
        self.runner.forward(ids, batch)
