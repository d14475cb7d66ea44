"""Padding of prefill steps: sizes, pages, and the state afterwards."""

import pytest

import auraflux
from auraflux.cache import CacheSettings
from auraflux.engine.engine import PREFILL_SIZES, Engine
from auraflux.engine.graph_runner import GraphRunner
from tests.engine.tiny import tiny
from tests.models.oracles import prefill

TEXT = [3 + n % 20 for n in range(300)]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Return an engine that pads prefill steps as on a GPU."""
    monkeypatch.setattr(GraphRunner, "supports_prefill", True)
    # a single kind of pages, so that they can be counted
    settings = CacheSettings(sink_tokens=0, recent_window=0)
    return auraflux.load(tiny(), kv=settings, quantize=4, context=300, device="cpu", graphs=False, max_sequences=1).engine


def sizes_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that collects the sizes of the coming steps."""
    seen: list[int] = []
    forward = engine.runner.forward

    def recorded(flat, batch):
        seen.append(len(flat))
        return forward(flat, batch)

    monkeypatch.setattr(engine.runner, "forward", recorded)
    return seen


def test_prefill_steps_have_few_sizes(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "chunk", 100)
    seen = sizes_of(engine, monkeypatch)
    # chunks of 100 tokens, and the rest
    for count in (1, 3, 4, 32, 33, 65, 100, 165):
        sequence = engine.cache.open()
        prefill(engine, sequence, TEXT[:count])
        assert sequence.length == count
        sequence.close()
    assert seen == [1, 32, 32, 32, 64, 100, 100, 100, 100]
    assert {32, 64} <= set(PREFILL_SIZES)


def test_padding_leaves_no_pages(engine: Engine):
    sequence = engine.cache.open()
    prefill(engine, sequence, TEXT[:130])
    (row,) = sequence.group_states.values()
    assert len(row.pages) == 3
    assert sequence.nbytes == engine.cache.nbytes
    other = sequence.fork()
    prefill(engine, other, TEXT[:5])
    assert (sequence.length, other.length) == (130, 135)


def test_a_step_is_not_padded_past_the_context(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    seen = sizes_of(engine, monkeypatch)
    sequence = engine.cache.open()
    for count in (240, 40, 20):
        prefill(engine, sequence, TEXT[:count])
    assert seen == [256, 40, 20]


def test_without_pages_a_step_is_not_padded(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    seen = sizes_of(engine, monkeypatch)
    one, two = engine.cache.open(), engine.cache.open()
    (group,) = one.group_states
    prefill(engine, one, TEXT[:240])
    taken = [group.pool.allocate() for _ in range(group.pool.free - 2)]
    prefill(engine, two, TEXT[:120])
    prefill(engine, one, TEXT[:10])
    group.pool.release(taken)
    assert seen == [256, 128, 10]
    assert (one.length, two.length) == (250, 120)


def test_an_interrupted_step_rolls_the_sequence_back(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    sequence = engine.cache.open()
    prefill(engine, sequence, TEXT[:40])
    held = engine.cache.nbytes
    with monkeypatch.context() as patch:

        def stop(flat, batch):
            raise KeyboardInterrupt

        patch.setattr(engine.runner, "forward", stop)
        with pytest.raises(KeyboardInterrupt):
            prefill(engine, sequence, TEXT[:70])
    assert (sequence.length, engine.cache.nbytes) == (40, held)
    prefill(engine, sequence, TEXT[:70])
    assert sequence.length == 110


@pytest.mark.parametrize("lacking", [0, 1])
def test_padding_does_not_evict_a_window(lacking: int, monkeypatch: pytest.MonkeyPatch):
    """A chunk of five tokens padded to 64 in a mixed batch, where windows have just enough pages, or one too few."""
    monkeypatch.setattr(GraphRunner, "supports_prefill", True)
    monkeypatch.setattr("auraflux.engine.engine.MIXED_SIZES", (66,))
    settings = CacheSettings(sink_tokens=0, recent_window=32)
    engine = auraflux.load(tiny(), kv=settings, quantize=4, context=300, device="cpu", graphs=False, max_sequences=4).engine
    prefilling, *decoding = (engine.cache.open() for _ in range(3))
    for sequence, count in zip((prefilling, *decoding), (124, 64, 64), strict=True):
        engine.step(engine.cache.batch([sequence]), [TEXT[:count]])
    (window,) = (group for group in engine.cache.page_groups if group.span is not None)
    # two for the decoding sequences and one for the chunk: all start a new page
    taken = [window.pool.allocate() for _ in range(window.free - 3 + lacking)]
    found = engine.decode_mixed(engine.decode_batch(decoding), [1, 2], prefilling, TEXT[:5])
    assert (found is None) == bool(lacking)
    assert [sequence.length for sequence in (prefilling, *decoding)] == ([124, 64, 64] if lacking else [129, 65, 65])
    assert all(prefilling.group_states[window].can_truncate(at) for at in range(124, prefilling.length + 1))
    window.pool.release(taken)


def test_mixed_batches_are_warmed_up_for_every_number_of_sequences(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(GraphRunner, "supports_prefill", True)
    monkeypatch.setattr("auraflux.engine.engine.MIXED_SIZES", (48, 64))
    seen: list[tuple[int, int]] = []
    settings = CacheSettings(sink_tokens=0, recent_window=0)
    engine = auraflux.load(tiny(), kv=settings, quantize=4, context=300, device="cpu", graphs=False, max_sequences=8).engine
    run_captured = engine.runner.run_captured

    def recorded(given, batch):
        seen.append((batch.decode.tokens, batch.prefill.tokens))
        return run_captured(given, batch)

    monkeypatch.setattr(engine.runner, "run_captured", recorded)
    # one sequence prefills: of two, one would decode, which no mixed batch serves; of eight, up to seven decode
    assert [engine.mixed_batch_counts(parallel) for parallel in (1, 2, 3, 8)] == [[], [], [2], [2, 4, 7]]
    for count in engine.mixed_batch_counts(8):
        engine.warm_up_mixed(count)
    # seven are padded to eight on a GPU; the rest of each total is the chunk
    assert seen == [
        pair
        for count, chunks in ((2, (46, 62)), (4, (44, 60)), (7, (40, 56)))
        for size in chunks
        for pair in [(count, size)] * 2
    ]
    assert engine.cache.nbytes == 0
