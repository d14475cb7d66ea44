"""A mirror's memory follows the cache whose journal it reads, whatever becomes of the sequences."""

import json
import random

import pytest
import torch

from auraflux.cache import AttentionShape, Cache, CacheSettings, RecurrentShape, Sequence
from auraflux.cache.journal import Journal, Mirror, facts_of
from auraflux.errors import CacheFull, FormatError

HEADS, WIDTH = 2, 32
SHAPES = [AttentionShape(HEADS, WIDTH, window=40), RecurrentShape(8, 2, 4, 4), AttentionShape(HEADS, WIDTH)]


def cache(kv: str, held: range | None = None) -> Cache:
    sizes = {"context": 128, "sequences": 4, "tokens": 256, "page": 16, "chunk": 32}
    return Cache(SHAPES, CacheSettings(kv), **sizes, held=held)


def write(caches: list[Cache], batches: list, values: torch.Generator) -> list[torch.Tensor]:
    """Give each layer of all caches the same keys and values and states, and what attention then reads."""
    count, read = sum(batches[0].counts), []
    for number, shape in enumerate(SHAPES):
        given = torch.randn(3, count, HEADS, WIDTH, generator=values)
        for each, batch in zip(caches, batches, strict=True):
            if number not in each.held:
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
def test_all_that_happens_to_sequences_is_repeated(kv: str):
    whole, first = cache(kv), cache(kv, range(1))
    others = [cache(kv, range(1, 2)), cache(kv, range(2, 3))]
    journal, told = Journal(first), [Mirror(other) for other in others]
    values, chance = torch.Generator().manual_seed(0), random.Random(1)
    pairs: list[tuple[Sequence, Sequence]] = [(whole.open(), first.open())]

    def act(name: str, pair: tuple[Sequence, Sequence]) -> None:
        match name:
            case "open" if len(pairs) < 4:
                pairs.append((whole.open(), first.open()))
            case "fork" if len(pairs) < 4:
                pairs.append((pair[0].fork(), pair[1].fork()))
            case "cut":
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
        act(chance.choice(["open", "fork", "cut", "checkpoint", "checkpoint", "close"]), chance.choice(pairs))
        chosen = chance.sample(pairs, chance.randint(1, len(pairs)))
        counts = [1] * len(chosen) if chance.random() < 0.5 else [chance.randint(1, 8) for _ in chosen]
        here, there = whole.batch([one for one, _ in chosen]), first.batch([other for _, other in chosen])
        try:
            here.extend(counts)
        except CacheFull:
            with pytest.raises(CacheFull):
                there.extend(counts)
            continue
        there.extend(counts)
        sent = json.loads(json.dumps([journal.take(), facts_of(there)]))
        for mirror in told:
            mirror.repeat(sent[0])
        batches = [here, there, *(mirror.batch(sent[1]) for mirror in told)]
        read = write([whole, first, *others], batches, values)
        for one, other in zip(read[::2], read[1::2], strict=True):
            assert torch.equal(one, other)


def test_layers_of_others_take_no_memory():
    first = cache("k4v4", range(1))
    assert {store.device.type for part in first.parts for store in part.own} == {"cpu"}
    rest = sum(cache("k4v4", range(number, number + 1)).reserved_nbytes for number in range(3))
    assert rest == cache("k4v4").reserved_nbytes
    assert first.reserved_nbytes < rest


def test_what_nobody_writes_is_refused():
    mirror = Mirror(cache("none"))
    with pytest.raises(FormatError, match="nothing that happens to a step"):
        mirror.repeat([[[1, 64], "strange"]])
