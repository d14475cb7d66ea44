"""The kernel that fetches experts from disk: requests in the mailbox, answered by real threads that read files."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from auraflux.errors import ExpertError
from auraflux.ops import Routing, route
from auraflux.ops.moe.pool import HITS, MISSES, ExpertPool
from auraflux.weights.experts.packed_files import ExpertFiles
from auraflux.weights.experts.pool.disk_tier import DiskTier
from tests.ops.gpu.test_cuda import _sound_interpreter  # noqa: F401
from tests.weights.experts.packed import COUNT, write_experts

pytestmark = [
    pytest.mark.usefixtures("_sound_interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is compiled for the GPU here"),
]
LAYERS, SLOTS, CPU = 2, 7, torch.device("cpu")
ROUTING = Routing(3, "softmax", True)


@pytest.fixture
def files(tmp_path: Path) -> ExpertFiles:
    torch.manual_seed(0)
    return write_experts(tmp_path, LAYERS, lanes=1)[0]


def pool_of(files: ExpertFiles, **options) -> tuple[ExpertPool, DiskTier]:
    tier = DiskTier(5 * files.files[0].stride, CPU, **options)
    for file in files.files:
        tier.add_layer(file, file.like, {})
    tier.start(3)
    memory = torch.zeros(SLOTS, files.files[0].nbytes, dtype=torch.uint8)
    likes = [dict(file.like) for file in files.files]
    pool = ExpertPool.empty(memory, tier.mailbox.slots.view(-1), torch.zeros(LAYERS, COUNT, dtype=torch.int64), likes)
    return replace(pool, disk=tier), tier


def fetch(pool: ExpertPool, layer: int, ids: list[int]) -> list[int]:
    from auraflux.ops.moe.cuda import fetch_disk

    return fetch_disk.fetch(pool, layer, torch.tensor([ids], dtype=torch.int32))[0].tolist()


def holds(pool: ExpertPool, files: ExpertFiles) -> None:
    """Hold the tables to each other, and every slot to the bytes of its expert's file."""
    owned = {int(owner): slot for slot, owner in enumerate(pool.owners) if owner >= 0}
    assert owned == {index: int(slot) for index, slot in enumerate(pool.slots.view(-1)) if slot >= 0}
    for owner, slot in owned.items():
        file = files.files[owner // COUNT]
        data = torch.from_file(str(file.path), size=file.file_nbytes, dtype=torch.uint8)
        first = file.offset(owner % COUNT)
        assert torch.equal(pool.memory[slot], data[first : first + file.nbytes])
    assert not any(pool.disk.mailbox.arrived.tolist())


def test_experts_come_from_disk(files: ExpertFiles):
    pool, tier = pool_of(files)
    for step in range(4):
        for layer in range(LAYERS):
            ids = torch.randperm(COUNT)[:3].tolist()
            rows = fetch(pool, layer, ids)
            assert rows == pool.slots[layer, ids].tolist()
            assert min(rows) >= 0
            holds(pool, files)
            assert pool.state[HITS] + pool.state[MISSES] == 3 * (LAYERS * step + layer + 1)
    tier.check()
    stats = tier.cache_stats()
    assert stats.hits + stats.misses == pool.state[MISSES]
    assert stats.misses > 0


def test_experts_are_selected_by_scores(files: ExpertFiles):
    from auraflux.ops.moe.cuda import fetch_disk

    pool, _ = pool_of(files)
    x, scores = torch.randn(2, 64).bfloat16(), torch.randn(2, COUNT).bfloat16()
    scores[1] = scores[0]
    ids, rows, mailbox = fetch_disk.fetch_chosen(pool, 1, x, scores, ROUTING, None)
    assert mailbox is None
    assert torch.equal(ids.sort().values, route.reference(scores, ROUTING)[0].sort().values)
    assert torch.equal(rows, pool.slots[1][ids.long()])
    holds(pool, files)


def test_an_expert_that_cannot_be_read_ends_the_step(files: ExpertFiles):
    with files.files[0].path.open("r+b") as file:
        file.seek(files.files[0].offset(2))
        file.write(b"\xff\x00\xff")
    pool, tier = pool_of(files)
    before = fetch(pool, 1, [1, 2, 3])
    rows = fetch(pool, 0, [1, 2, 3])
    assert all(0 <= row < SLOTS for row in rows)
    assert int(pool.slots[0, 2]) == -1
    holds(pool, files)
    # nothing is asked for until the host has seen the error
    number = int(tier.mailbox.request)
    fetch(pool, 1, [7, 8, 9])
    assert int(tier.mailbox.request) == number
    assert pool.slots[1, 7:10].tolist() == [-1] * 3
    with pytest.raises(ExpertError, match=r"expert 2 of model.layers.0.mlp cannot be read: .* does not match its checksum"):
        tier.check()
    assert fetch(pool, 1, [1, 2, 3]) == before
    fetch(pool, 1, [7, 8, 9])
    tier.check()
    assert min(pool.slots[1, 7:10]) >= 0
    holds(pool, files)


def test_a_kernel_does_not_wait_forever(files: ExpertFiles):
    pool, tier = pool_of(files, bandwidth=4 * files.files[0].stride)
    tier.mailbox.patience.fill_(20_000)
    rows = fetch(pool, 0, [4, 5, 6])
    assert all(0 <= row < SLOTS for row in rows)
    with pytest.raises(ExpertError, match=r"model.layers.0.mlp cannot be read: .* no answer"):
        tier.check()
    tier.mailbox.patience.fill_(10**12)
    assert fetch(pool, 0, [4, 5, 6]) == pool.slots[0, 4:7].tolist()
    tier.check()
    holds(pool, files)
