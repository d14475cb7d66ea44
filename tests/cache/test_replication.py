"""A replica's memory follows the cache whose replication log it applies, through all operations on sequences."""

import json
import random

import pytest
import torch

from auraflux.cache import AttentionShape, Cache, CacheSettings, KVSequence, RecurrentShape
from auraflux.cache.replication import CacheReplica, ReplicationLog, batch_facts
from auraflux.errors import CacheFull, FormatError

HEADS, WIDTH = 2, 32
SHAPES = [AttentionShape(HEADS, WIDTH, window=40), RecurrentShape(8, 2, 4, 4), AttentionShape(HEADS, WIDTH)]


def cache(kv: str, local_layers: range | None = None) -> Cache:
    sizes = {"context": 128, "sequences": 4, "tokens": 256, "page": 16, "chunk": 32}
    return Cache(SHAPES, CacheSettings(kv), **sizes, local_layers=local_layers)


def write(caches: list[Cache], batches: list, values: torch.Generator) -> list[torch.Tensor]:
    """Append the same keys, values and states to each layer of all caches; return the results of attention."""
    count, read = sum(batches[0].counts), []
    for number, shape in enumerate(SHAPES):
        given = torch.randn(3, count, HEADS, WIDTH, generator=values)
        for each, batch in zip(caches, batches, strict=True):
            if number not in each.local_layers:
                continue
            layer = each.layers[number]
            if isinstance(shape, AttentionShape):
                layer.append(batch, given[1], given[2])
                read.append(layer.attend(batch, given[0], WIDTH**-0.5))
            else:
                x = given[0].flatten(1)[:, :8].contiguous()
                read.append(layer.convolve(batch, x, torch.ones(4, 8)))
    return read


@pytest.mark.parametrize("kv", ["none", "k4v4"])
def test_all_operations_on_sequences_are_replicated(kv: str):
    full, first = cache(kv), cache(kv, range(1))
    others = [cache(kv, range(1, 2)), cache(kv, range(2, 3))]
    log, replicas = ReplicationLog(first), [CacheReplica(other) for other in others]
    values, chance = torch.Generator().manual_seed(0), random.Random(1)
    pairs: list[tuple[KVSequence, KVSequence]] = [(full.open(), first.open())]

    def act(name: str, pair: tuple[KVSequence, KVSequence]) -> None:
        match name:
            case "open" if len(pairs) < 4:
                pairs.append((full.open(), first.open()))
            case "fork" if len(pairs) < 4:
                pairs.append((pair[0].fork(), pair[1].fork()))
            case "truncate":
                length = chance.randint(0, pair[0].length)
                assert pair[0].truncate(length) == pair[1].truncate(length)
            case "checkpoint":
                pair[0].checkpoint()
                pair[1].checkpoint()
            case "close" if len(pairs) > 1:
                pairs.remove(pair)
                pair[0].close()
                pair[1].close()

    for _ in range(60):
        act(chance.choice(["open", "fork", "truncate", "checkpoint", "checkpoint", "close"]), chance.choice(pairs))
        chosen = chance.sample(pairs, chance.randint(1, len(pairs)))
        counts = [1] * len(chosen) if chance.random() < 0.5 else [chance.randint(1, 8) for _ in chosen]
        here, there = full.batch([one for one, _ in chosen]), first.batch([other for _, other in chosen])
        try:
            here.extend(counts)
        except CacheFull:
            with pytest.raises(CacheFull):
                there.extend(counts)
            continue
        there.extend(counts)
        sent = json.loads(json.dumps([log.take(), batch_facts(there)]))
        for replica in replicas:
            replica.apply(sent[0])
        batches = [here, there, *(replica.batch(sent[1]) for replica in replicas)]
        read = write([full, first, *others], batches, values)
        for one, other in zip(read[::2], read[1::2], strict=True):
            assert torch.equal(one, other)


def test_layers_of_other_ranks_take_no_memory():
    first = cache("k4v4", range(1))
    assert {store.device.type for group in first.groups for store in group.local_stores} == {"cpu"}
    rest = sum(cache("k4v4", range(number, number + 1)).reserved_nbytes for number in range(3))
    assert rest == cache("k4v4").reserved_nbytes
    assert first.reserved_nbytes < rest


def test_unknown_entries_are_refused():
    replica = CacheReplica(cache("none"))
    with pytest.raises(FormatError, match="unknown entry 'strange' for a step index"):
        replica.apply([[[1, 64], "strange"]])
