"""How steps of prompts are filled up with extra tokens: sizes, room, and what is left when it is over."""

import pytest

import auraflux
from auraflux.cache import CacheSettings
from auraflux.run.engine import SIZES, Engine
from auraflux.run.graph import Replayer
from tests.models.oracles import prefill
from tests.run.tiny import tiny

TEXT = [3 + n % 20 for n in range(300)]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine that reads prompts as on a GPU."""
    monkeypatch.setattr(Replayer, "reads", True)
    # one kind of pages, so that they can be counted
    settings = CacheSettings(first=0, newest=0)
    return auraflux.load(tiny(), kv=settings, quantize=4, context=300, device="cpu", graphs=False, sequences=1).engine


def sizes_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the steps that will be taken."""
    seen: list[int] = []
    forward = engine.runner.forward

    def noted(flat, batch):
        seen.append(len(flat))
        return forward(flat, batch)

    monkeypatch.setattr(engine.runner, "forward", noted)
    return seen


def test_prompts_are_read_in_few_sizes(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "chunk", 100)
    seen = sizes_of(engine, monkeypatch)
    # pieces of 100 tokens, and what is left
    for count in (1, 3, 4, 32, 33, 65, 100, 165):
        sequence = engine.cache.open()
        prefill(engine, sequence, TEXT[:count])
        assert sequence.length == count
        sequence.close()
    assert seen == [1, 32, 32, 32, 64, 100, 100, 100, 100]
    assert {32, 64} <= set(SIZES)


def test_extra_tokens_leave_no_pages(engine: Engine):
    sequence = engine.cache.open()
    prefill(engine, sequence, TEXT[:130])
    (row,) = sequence.rows.values()
    assert len(row.pages) == 3
    assert sequence.nbytes == engine.cache.nbytes
    other = sequence.fork()
    prefill(engine, other, TEXT[:5])
    assert (sequence.length, other.length) == (130, 135)


def test_a_step_is_not_filled_up_past_the_context(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    seen = sizes_of(engine, monkeypatch)
    sequence = engine.cache.open()
    for count in (240, 40, 20):
        prefill(engine, sequence, TEXT[:count])
    assert seen == [256, 40, 20]


def test_where_pages_are_scarce_the_tokens_alone_are_read(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    seen = sizes_of(engine, monkeypatch)
    one, two = engine.cache.open(), engine.cache.open()
    (group,) = one.rows
    prefill(engine, one, TEXT[:240])
    taken = [group.pool.take() for _ in range(group.pool.free - 2)]
    prefill(engine, two, TEXT[:120])
    prefill(engine, one, TEXT[:10])
    group.pool.release(taken)
    assert seen == [256, 128, 10]
    assert (one.length, two.length) == (250, 120)


def test_a_step_that_is_stopped_leaves_the_sequence_as_it_was(engine: Engine, monkeypatch: pytest.MonkeyPatch):
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
def test_a_window_is_not_given_up_for_tokens_that_fill_a_step_up(lacking: int, monkeypatch: pytest.MonkeyPatch):
    """A piece of five tokens is read as 64 with what is written, where windows have no page to spare, or one too few."""
    monkeypatch.setattr(Replayer, "reads", True)
    monkeypatch.setattr("auraflux.run.engine.BESIDE", (66,))
    settings = CacheSettings(first=0, newest=32)
    engine = auraflux.load(tiny(), kv=settings, quantize=4, context=300, device="cpu", graphs=False, sequences=4).engine
    reading, *written = (engine.cache.open() for _ in range(3))
    for sequence, count in zip((reading, *written), (124, 64, 64), strict=True):
        engine.step(engine.cache.batch([sequence]), [TEXT[:count]])
    (window,) = (group for group in engine.cache.page_groups if group.span is not None)
    # two for what is written and one for the piece: all of them lie in a page that is not begun yet
    taken = [window.pool.take() for _ in range(window.free - 3 + lacking)]
    found = engine.decode_beside(engine.writing(written), [1, 2], reading, TEXT[:5])
    assert (found is None) == bool(lacking)
    assert [sequence.length for sequence in (reading, *written)] == ([124, 64, 64] if lacking else [129, 65, 65])
    assert all(reading.rows[window].reaches(at) for at in range(124, reading.length + 1))
    window.pool.release(taken)


def test_steps_that_read_beside_are_rehearsed_for_every_number_of_texts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Replayer, "reads", True)
    monkeypatch.setattr("auraflux.run.engine.BESIDE", (48, 64))
    seen: list[tuple[int, int]] = []
    settings = CacheSettings(first=0, newest=0)
    engine = auraflux.load(tiny(), kv=settings, quantize=4, context=300, device="cpu", graphs=False, sequences=8).engine
    beside = engine.runner.repeated_beside

    def noted(given, both):
        seen.append((both.writing.tokens, both.reading.tokens))
        return beside(given, both)

    monkeypatch.setattr(engine.runner, "repeated_beside", noted)
    # one of the texts is read, so of two none is written beside it, and of eight up to seven are
    assert [engine.counts_beside(parallel) for parallel in (1, 2, 3, 8)] == [[], [], [2], [2, 4, 7]]
    for texts in engine.counts_beside(8):
        engine.rehearse_beside(texts)
    # seven are a step of eight on a GPU; what is left of each total is the prompt's
    assert seen == [
        pair for texts, left in ((2, (46, 62)), (4, (44, 60)), (7, (40, 56))) for size in left for pair in [(texts, size)] * 2
    ]
    assert engine.cache.nbytes == 0
