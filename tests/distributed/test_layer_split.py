"""Split of layers into stages with minimal peak memory use."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auraflux.distributed.layer_split import LayerSizes, layer_sizes, split_layers
from auraflux.errors import SettingsError
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.engine.tiny import tiny


def test_equal_machines_get_equal_stages():
    assert split_layers(LayerSizes([10] * 8, 0), [100, 100]) == [range(4), range(4, 8)]


def test_the_first_stage_has_the_embedding():
    assert split_layers(LayerSizes([10] * 8, 20), [100, 100]) == [range(3), range(3, 8)]


def test_more_memory_takes_more_layers():
    assert split_layers(LayerSizes([10] * 8, 0), [100, 300]) == [range(2), range(2, 8)]


def test_every_rank_has_a_layer():
    assert split_layers(LayerSizes([1, 100], 0), [10**9, 1]) == [range(1), range(1, 2)]
    with pytest.raises(SettingsError, match="2 layers cannot be split into 3"):
        split_layers(LayerSizes([1, 1], 0), [1, 1, 1])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 50), min_size=3, max_size=7),
    st.integers(0, 40),
    st.lists(st.integers(10, 90), min_size=2, max_size=3),
)
def test_no_other_split_has_a_lower_peak(layers: list[int], ends: int, memory: list[int]):
    sizes = LayerSizes(layers, ends)

    def fullest(parts: list[range]) -> float:
        return max(sizes.of(part) / room for part, room in zip(parts, memory, strict=True))

    def cuts(first: int, ranks: int) -> list[list[range]]:
        if ranks == 1:
            return [[range(first, len(layers))]]
        ends_at = range(first + 1, len(layers) - ranks + 2)
        return [[range(first, end), *rest] for end in ends_at for rest in cuts(end, ranks - 1)]

    found = split_layers(sizes, memory)
    assert [part.start for part in found] == [0, *(part.stop for part in found[:-1])]
    assert found[-1].stop == len(layers)
    assert fullest(found) <= min(map(fullest, cuts(0, len(memory)))) * (1 + 1e-9)


def test_sizes_are_those_of_the_files():
    checkpoint = open_checkpoint(tiny())
    found = layer_sizes(checkpoint, lambda name: name, 2)
    assert sum(found.layers) + found.ends == sum(checkpoint.sizes().values())
    assert found.layers[0] == found.layers[1] > 0
