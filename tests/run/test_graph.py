"""Steps of decoding that are recorded once and replayed."""

from types import SimpleNamespace

import pytest
import torch

import auraflux
from auraflux.cache import CacheSettings
from auraflux.errors import DeviceMemoryError
from auraflux.run.engine import Engine
from tests.models.oracles import prefill
from tests.run.tiny import tiny

IDS = list(range(3, 23))


def engine(**options) -> Engine:
    return auraflux.load(tiny(), quantize=4, context=256, device="cpu", sequences=2, **options).engine


def recordings(made: Engine) -> int:
    return sum(step.recording is not None for step in made.replayer._steps.values())


def written(made: Engine, order: list[list[int]], steps: int) -> list[list[int]]:
    """What three texts become when batches of some of them take turns."""
    sequences = [made.cache.open() for _ in range(3)]
    texts = [[int(prefill(made, sequence, IDS[i:]).argmax())] for i, sequence in enumerate(sequences)]
    for _ in range(steps):
        for chosen in order:
            batch = made.cache.batch([sequences[i] for i in chosen])
            scores = made.decode(batch, [texts[i][-1] for i in chosen])
            for i, row in zip(chosen, scores, strict=True):
                texts[i].append(int(row.argmax()))
    return texts


def test_batches_of_one_size_share_a_recording():
    replayed, plain = engine(), engine(graphs=False)
    order = [[0], [1, 2], [2], [2, 0]]
    assert written(replayed, order, 8) == written(plain, order, 8)
    assert recordings(replayed) == 2
    assert recordings(plain) == 0
    assert plain.replayer.refused == "it is switched off"


def test_a_longer_text_is_recorded_anew():
    made = engine()
    sequence = made.cache.open()
    prefill(made, sequence, IDS)
    batch = made.cache.batch([sequence])
    seen = []
    for token in range(120):
        made.decode(batch, [token])
        seen.append(recordings(made))
    # one for 64, 128 and 256 tokens
    assert seen[0] == 0
    assert seen[1] == 1
    assert seen[-1] == 3
    assert batch.index.reach == 256


def test_a_step_that_checks_guesses_is_replayed_for_each_number_of_tokens():
    found = []
    for made in (engine(), engine(graphs=False)):
        sequence = made.cache.open()
        prefill(made, sequence, IDS)
        batch, scores = made.cache.batch([sequence]), []
        for turn, count in enumerate([4, 2, 4, 2, 4, 2]):
            length = sequence.length
            scores.append(made.verify(batch, [IDS[turn : turn + count]]))
            # some are kept
            sequence.truncate(length + turn % 2 + 1)
        found.append(torch.cat(scores))
        assert sum(step.recording is not None for step in made.replayer._several.values()) == 2 * made.graphs
    assert torch.equal(*found)


def test_texts_with_fewer_guesses_are_checked_with_those_that_have_more():
    found = []
    for made in (engine(), engine(graphs=False)):
        sequences = [made.cache.open() for _ in range(3)]
        for number, sequence in enumerate(sequences):
            prefill(made, sequence, IDS[number:])
        batch, scores = made.cache.batch(sequences), []
        before = [sequence.length for sequence in sequences]
        # as a GPU does: each is given as many tokens as the one with most
        for pieces in ([IDS[:4], IDS[:1], IDS[3:5]], [IDS[:1], IDS[2:6], IDS[:1]], [IDS[:4], IDS[1:5], IDS[2:6]]):
            scores.append(made.replayer.verify(batch, pieces) if made.graphs else made.verify(batch, pieces))
            assert [sequence.length for sequence in sequences] == [n + len(p) for n, p in zip(before, pieces, strict=True)]
            for sequence, length in zip(sequences, before, strict=True):
                sequence.truncate(length)
        found.append(torch.cat(scores))
        assert sum(step.recording is not None for step in made.replayer._several.values()) == made.graphs
    assert torch.equal(*found)


def test_the_newest_window_waits_until_it_is_full():
    settings = CacheSettings("k8v4", newest=32)
    replayed, plain = engine(kv=settings), engine(kv=settings, graphs=False)
    assert written(replayed, [[0], [1, 2]], 20) == written(plain, [[0], [1, 2]], 20)


def test_a_gpu_without_memory_is_told_in_a_sentence_and_the_text_goes_on(monkeypatch: pytest.MonkeyPatch):
    made = engine(graphs=False)
    sequence = made.cache.open()
    prefill(made, sequence, IDS)
    batch, forward = made.cache.batch([sequence]), made.runner.forward
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 20, 1 << 30))

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(made.runner, "forward", fail)
    with pytest.raises(DeviceMemoryError, match=r"no memory left: 0\.0 of its 1\.1 GB are free.*--context"):
        made.decode(batch, [5])
    assert sequence.length == len(IDS)
    monkeypatch.setattr(made.runner, "forward", forward)
    assert made.decode(batch, [5]).isfinite().all()


def read_in_pieces(made: Engine, monkeypatch: pytest.MonkeyPatch, pieces: int) -> torch.Tensor:
    """The scores after a prompt whose whole pieces are replayed where they can be, as on a GPU."""
    monkeypatch.setattr(made, "chunk", len(IDS))
    monkeypatch.setattr(made, "_size_of", lambda batch, counts: len(IDS) if counts == [len(IDS)] and made.graphs else None)
    return prefill(made, made.cache.open(), IDS * pieces + IDS[:3])


@pytest.mark.parametrize("fault", ["spoiled", "memory"])
def test_a_prompt_that_cannot_be_recorded_is_read_all_the_same(fault: str, monkeypatch: pytest.MonkeyPatch):
    made, plain = engine(), engine(graphs=False)

    def capture(work):
        if fault == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return SimpleNamespace(spoiled="something was read"), work()

    monkeypatch.setattr(made.replayer, "_capture", capture)
    found = read_in_pieces(made, monkeypatch, 4)
    assert torch.equal(found, read_in_pieces(plain, monkeypatch, 4))
    assert made.replayer.unread in ("something was read", "the GPU has no memory for it")
    assert made.replayer.refused is None
    assert recordings(made) == 0


def test_pieces_of_a_prompt_are_replayed_with_their_own_positions(monkeypatch: pytest.MonkeyPatch):
    made, plain = engine(), engine(graphs=False)
    asked: list[list[int]] = []

    def capture(work):
        result = work()

        def replay() -> None:
            (step,) = (step for step in made.replayer._steps.values() if step.recording is not None)
            asked.append(step.positions.tolist())
            result.copy_(work())

        return SimpleNamespace(spoiled=None, replay=replay), result

    monkeypatch.setattr(made.replayer, "_capture", capture)
    monkeypatch.setattr(made, "_batch_for", lambda sequence, ids: made.cache.batch([sequence], len(ids)))
    monkeypatch.setattr(plain, "_batch_for", lambda sequence, ids: plain.cache.batch([sequence], len(ids)))
    assert torch.equal(read_in_pieces(made, monkeypatch, 5), read_in_pieces(plain, monkeypatch, 5))
    # the first two run their Python, then one is replayed after the other
    assert [positions[0] for positions in asked] == [40, 60, 80]
    assert recordings(made) == 1


@pytest.mark.parametrize("graphs", [True, False])
def test_tokens_that_fill_a_step_up_belong_to_nobody(graphs: bool):
    """As on a GPU, where batches come in few sizes: what is written is the same, and no page is taken."""
    filled, plain = engine(graphs=graphs), engine(graphs=graphs)
    texts = {}
    for made, fillers in ((filled, 5), (plain, 0)):
        pair = [made.cache.open(), made.cache.open()]
        for i, sequence in enumerate(pair):
            prefill(made, sequence, IDS[i:])
        batch = made.cache.batch(pair, fillers=fillers)
        texts[fillers] = [made.decode(batch, [token, token + 1]).argmax(-1).tolist() for token in range(80)]
        for sequence in pair:
            sequence.close()
        assert made.cache.nbytes == 0
    assert texts[5] == texts[0]
    assert filled.cache.fills


def test_a_batch_of_one_size_is_one_recording_whoever_is_in_it():
    made = engine()
    pair = [made.cache.open(), made.cache.open()]
    for sequence in pair:
        prefill(made, sequence, IDS)
    for _ in range(3):
        for some, fillers in (([pair[0]], 3), (pair, 2)):
            made.decode(made.cache.batch(some, fillers=fillers), [3] * len(some))
    assert recordings(made) == 1
