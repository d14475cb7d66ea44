"""Pipeline parallelism: each stage has consecutive layers and sends its hidden states to the next.

The last stage sends hidden states to rank 0, which has the embedding, the final norm and the LM head: hidden states are much
smaller than logits, and tied embeddings are stored once. Rank 0 does not wait for a prefill chunk that needs no logits: while
the other stages run it, rank 0 runs the next.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import Batch, Cache, Logits
from auraflux.cache.replication import CacheReplica, ReplicationLog, batch_facts
from auraflux.distributed.comm.collectives import REPLIES, ROWS, tensor_at
from auraflux.distributed.comm.group import Group, PendingReceive
from auraflux.distributed.comm.mesh import Mesh
from auraflux.distributed.follower_replies import FollowerReplies
from auraflux.distributed.rank_runner import RankRunner, receive_embeddings, send_step
from auraflux.engine.device import to_device
from auraflux.engine.graph_runner import GraphRunner
from auraflux.engine.model_runner import ModelRunner

REPLY_NBYTES = 1 << 17  # receive buffer of short replies, which is posted a step ahead
INTERRUPTED = "a step was interrupted while it was sent to the next stage."


class PipelineRunner(RankRunner):
    """Runner of rank 0: it runs the first stage and then the LM head on the result of the last."""

    def __init__(self, model: Any, cache: Cache, exact: bool, group: Group, mesh: Mesh, graphs: bool):
        super().__init__(model, cache, exact, group, mesh)
        self.stage, self.replication_log = model, ReplicationLog(cache)
        # receives of steps that were interrupted
        self._pending: list[PendingReceive] = []
        # receive of the next reply, posted early
        self._posted: PendingReceive | None = None
        # the next stage waits for the hidden states of an announced step
        self._owes_rows = False
        self._head = GraphRunner(HeadRunner(self), graphs)

    def forward(self, flat: Tensor, batch: Batch) -> Tensor:
        """Run tokens that have cache slots; return the final hidden states that need logits, [N, H]."""
        with self._announced(flat, batch, replayed=False):
            found = self._hidden(self.run_captured(flat, batch), batch)
            return found if batch.logits is Logits.NONE else self.normed(found)

    def announce_step(self, ids: Tensor, batch: Batch) -> AbstractContextManager[None]:
        """Announce a step that is replayed inside the block."""
        return self._announced(ids, batch, replayed=True)

    @contextmanager
    def _announced(self, ids: Tensor, batch: Batch, replayed: bool) -> Iterator[None]:
        """Announce a step to the next stage, which prepares it while this rank runs its layers inside the block."""
        self.group.check()
        while self._pending:
            self._pending[0].wait()
            del self._pending[0]
        changes = {"replication_log": self.replication_log.take(), "batch": batch_facts(batch), "replayed": replayed}
        self._announce(ids, batch, changes)
        try:
            yield
        except BaseException:
            if self._owes_rows:
                # the next stage waits for hidden states: send zeros, whose cache entries are rolled back with the step
                self._send(torch.zeros(len(ids), self.stage.config.hidden, dtype=self.stage.dtype), batch)
            raise

    def _announce(self, ids: Tensor, batch: Batch, message: dict[str, Any]) -> None:
        try:
            self.group.send_message(message, self.mesh.first_ranks[1])
        except BaseException:
            self.group.abort(INTERRUPTED)
            raise
        self._owes_rows = True

    def _send(self, rows: Tensor, batch: Batch) -> None:
        """Send hidden states to the next stage and post the receive of the result."""
        try:
            if batch.logits is not Logits.NONE:
                self._pending.append(self._post_reply(rows))
            self.group.send(rows, self.mesh.first_ranks[1])
            self._owes_rows = False
            if self._posted is None:
                # posting takes a message itself, and this rank is idle now
                self._posted = self.group.post_receive(
                    REPLY_NBYTES, source=self.mesh.first_ranks[-1], dtype=torch.uint8, tag=REPLIES
                )
        except BaseException:
            self.group.abort(INTERRUPTED)
            raise

    def run_captured(self, given: Tensor, batch: Batch) -> Tensor:
        """Run the first stage, without transfers to other ranks: [T, H]."""
        with self.numerics():
            return self.stage.forward_stage(given, batch, self.cache)

    def finish_step(self, found: Tensor, batch: Batch) -> Tensor:
        """Run the other stages on the result of the first: logits [B, V]."""
        rows = self._hidden(found, batch)
        return self._head.replay(batch, rows) if batch.single else self.compute_logits(self.normed(rows))

    def _hidden(self, rows: Tensor, batch: Batch) -> Tensor:
        """Return the output of the last stage: [T, H]."""
        self._send(rows, batch)
        if batch.logits is Logits.NONE:
            return torch.empty(0)
        found = self._pending[0].wait()
        del self._pending[0]
        if is_short(rows):
            found = tensor_at(found, 0, *rows.shape, dtype=rows.dtype)
        return found if rows.is_cpu else found.to(self.device)

    def _post_reply(self, rows: Tensor) -> PendingReceive:
        """Post the receive of the last stage's output; as bytes if it is short."""
        if not is_short(rows):
            return self.group.post_receive(*rows.shape, source=self.mesh.first_ranks[-1], dtype=rows.dtype)
        posted, self._posted = self._posted, None
        return posted or self.group.post_receive(REPLY_NBYTES, source=self.mesh.first_ranks[-1], dtype=torch.uint8, tag=REPLIES)

    def normed(self, rows: Tensor) -> Tensor:
        """Apply the final norm: [T, H]."""
        with self.numerics():
            return self.stage.final_norm(rows)

    def rejoin(self, group: Group) -> None:
        """Continue with a restarted group, whose caches are empty."""
        self.group, self._pending, self._posted, self._owes_rows = group, [], None, False
        self.replication_log.take()
        self._head.reset()


class HeadRunner(ModelRunner):
    """Runner of the final norm and the LM head, for a `GraphRunner`."""

    def __init__(self, layers: PipelineRunner):
        super().__init__(layers.model, layers.cache, layers.exact)
        self._layers = layers

    def run_captured(self, given: Tensor, batch: Batch) -> Tensor:
        """[T, H] -> [T, V] float32."""
        return self._layers.compute_logits(self._layers.normed(given))


class MeshRunner(PipelineRunner):
    """Runner of rank 0 of a pipeline with several ranks per stage; the ranks of its stage run every step with it."""

    @contextmanager
    def _announced(self, ids: Tensor, batch: Batch, replayed: bool) -> Iterator[None]:
        with super()._announced(ids, batch, replayed):
            try:
                yield
            except BaseException:
                # the others wait inside the step and cannot be interrupted
                self.group.abort("a step was interrupted, and the ranks are out of step.")
                self._owes_rows = False
                raise

    def _announce(self, ids: Tensor, batch: Batch, message: dict[str, Any]) -> None:
        try:
            send_step(self.group, self.mesh.peers(0)[1:], {**message, "ids": ids.tolist()}, batch, self.model)
        except BaseException:
            self.group.abort(INTERRUPTED)
            raise
        super()._announce(ids, batch, message)


class StageRunner(RankRunner):
    """Runner of a follower's layers, for a `GraphRunner`."""

    def run_captured(self, given: Tensor, batch: Batch) -> Tensor:
        """[T, H] -> [T, H]."""
        with self.numerics():
            return self.model.forward_stage(given, batch, self.cache)  # type: ignore[attr-defined]


class PipelineRank:
    """Follower that runs the steps of rank 0 and replies to its requests."""

    def __init__(self, runner: StageRunner, graphs: bool, replies: FollowerReplies):
        self.runner, self.group, self.mesh, self._replies = runner, runner.group, runner.mesh, replies
        self.replica, self.graphs = CacheReplica(runner.cache), GraphRunner(runner, graphs)

    def follow(self) -> None:
        """Run steps until rank 0 ends."""
        group, before, after = self.group, self.mesh.previous_rank(self.group.rank), self.mesh.next_rank(self.group.rank)
        for message in group.messages(before or 0):
            if "batch" not in message:
                if after is not None:
                    group.send_message(message, after)
                if "end" in message:
                    return
                self._replies.reply(message, self.graphs.refused)
                continue
            found = self._step(message, before, after)
            if after is not None:
                group.send(found, after)
            elif group.rank in self.mesh.first_ranks and message["batch"]["logits"] != Logits.NONE.value:
                group.send(found, 0, REPLIES if is_short(found) else ROWS)

    def _step(self, message: dict[str, Any], before: int | None, after: int | None) -> Tensor:
        """Announce a step to the next stage, update the cache, wait for the hidden states and run the step."""
        device, tokens = self.runner.device, sum(message["batch"]["counts"])
        ids, embedded = message.pop("ids", None), message.pop("embedded", None)
        pending = None if before is None else post_rows(self.group, tokens, self.runner.model, before)
        if after is not None:
            self.group.send_message(message, after)
        self.replica.apply(message["replication_log"])
        batch = self.replica.batch(message["batch"])
        batch.embeddings = receive_embeddings(self.group, embedded, self.runner.model)
        # the first stage takes token ids, the others hidden states
        given = to_device(ids, device) if pending is None else pending.wait()
        given = given if given.device == device else given.to(device)
        return self.graphs.replay(batch, given) if message["replayed"] else self.runner.run_captured(given, batch)


def is_short(rows: Tensor) -> bool:
    """Return whether a reply fits into the buffer that rank 0 posts ahead."""
    return rows.nbytes <= REPLY_NBYTES


def post_rows(group: Group, tokens: int, model: Any, source: int) -> PendingReceive:
    """Post the receive of hidden states from the previous stage: [T, H]."""
    return group.post_receive(tokens, model.config.hidden, source=source, dtype=model.dtype)


class PipelineStageModel:
    """One stage of a model as a complete model, for calibration, which all ranks run together."""

    def __init__(self, model: Any, group: Group, mesh: Mesh):
        self.config, self.layers, self.span = model.config, model.layers, model.span
        self._model, self._group = model, group
        self._before, self._after = mesh.previous_rank(group.rank), mesh.next_rank(group.rank)

    def forward(self, ids: Tensor, batch: Batch, cache: Cache) -> Tensor:
        """Run the stage between its neighbours; the calibration records its keys."""
        group = self._group
        given = ids if self._before is None else post_rows(group, len(ids), self._model, self._before).wait().to(ids.device)
        found = self._model.forward_stage(given, batch, cache)
        if self._after is not None:
            group.send(found, self._after)
        return found
