"""The kernel that fetches experts hands some to the CPU: requests in the mailbox, answered by real threads."""

from dataclasses import replace

import pytest
import torch

from auraflux.ops.moe._pool_cases import LAYER, pooled
from auraflux.ops.moe.pool import MISSES, ON_CPU, CpuMailbox, ExpertPool
from auraflux.ops.moe.reference import expert_parts
from auraflux.ops.moe.routing import Routing
from auraflux.weights.experts.cpu_worker import CpuExpertWorker
from tests.ops.gpu.test_cuda import _sound_interpreter  # noqa: F401

ROUTING, COUNT, HIDDEN, INNER = Routing(4, "softmax", True), 12, 64, 64


def mailbox_of(worker: CpuExpertWorker, fetched: float) -> CpuMailbox:
    box, pairs = worker.mailbox, len(worker.mailbox.pairs)
    header = box.memory[box.offsets["layer"] :][:8].view(torch.int32)
    views = box.request_seq, box.done_seq, header, box.pairs, box.experts, box.x, box.result
    return CpuMailbox(*views, torch.zeros(3 + pairs, dtype=torch.int32), fetched * torch.arange(pairs + 1))


def layers_of(pool: ExpertPool) -> list[torch.Tensor]:
    """Return the blobs of every layer in the order of its experts."""
    nbytes = pool.nbytes[0]
    return [torch.stack([pool.host[int(at) : int(at) + nbytes] for at in row]) for row in pool.offsets]


@pytest.mark.usefixtures("_sound_interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is compiled for the GPU here")
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("fetched", [0.0, 0.5])
def test_the_cpu_answers_what_the_kernel_asks(tokens: int, fetched: float):
    from auraflux.ops.moe.cuda import fetch

    torch.manual_seed(0)
    args = pooled(tokens, ROUTING, COUNT, HIDDEN, INNER, 18, 18)
    pool = args["pool"]
    worker = CpuExpertWorker(layers_of(pool), pool.like[0], HIDDEN, INNER, 2)
    pool = replace(pool, mailbox=mailbox_of(worker, fetched))
    before = pool.slots[LAYER].clone()
    ids, rows, mailbox = fetch.fetch_chosen(pool, LAYER, args["x"], args["scores"], ROUTING, None)
    assert mailbox is pool.mailbox
    missing = {each for each in ids.flatten().tolist() if before[each] < 0}
    on_cpu = {each for each, row in zip(ids.flatten().tolist(), rows.flatten().tolist(), strict=True) if row < 0}
    assert on_cpu
    assert on_cpu <= missing
    assert (len(on_cpu) < len(missing)) == (fetched > 0)
    assert [int(pool.state[MISSES]), int(pool.state[ON_CPU])] == [3 + len(missing) - len(on_cpu), len(on_cpu)]
    with worker:
        while int(mailbox.done) != int(mailbox.request):
            pass
    assert worker.error is None
    count, state = int(mailbox.header[1]), mailbox.state.tolist()
    assert int(mailbox.header[0]) == LAYER
    assert state[:2] == [1, count]
    expected = torch.stack(
        [_expert(pool, args["x"], pair // ROUTING.k, int(ids.view(-1)[pair])) for pair in state[3 : 3 + count]]
    )
    torch.testing.assert_close(mailbox.result[:count], expected, rtol=2e-2, atol=2e-2)


def _expert(pool: ExpertPool, x: torch.Tensor, token: int, expert: int) -> torch.Tensor:
    """Return an expert's output for a token, from host memory."""
    first, nbytes = int(pool.offsets[LAYER, expert]), pool.nbytes[LAYER]
    one = replace(pool, memory=pool.host[first : first + nbytes][None], owners=pool.owners[:1], uses=pool.uses[:1])
    made, parts = replace(one.experts_in(torch.zeros(1, dtype=torch.int32), LAYER), slots=None), torch.zeros(1, 1, HIDDEN)
    expert_parts.reference(x[token : token + 1], torch.zeros(1, 1, dtype=torch.int32), made, parts)
    return parts[0, 0]
