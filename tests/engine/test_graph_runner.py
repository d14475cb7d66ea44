"""Steps that are captured once and replayed."""

from types import SimpleNamespace

import pytest
import torch

import auraflux
from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from auraflux.errors import DeviceMemoryError
from tests.engine.tiny import tiny
from tests.models.oracles import prefill

IDS = list(range(3, 23))


def engine(**options) -> Engine:
    return auraflux.load(tiny(), quantize=4, context=256, device="cpu", max_sequences=2, **options).engine


def recordings(made: Engine) -> int:
    return sum(step.recording is not None for step in made.graphs._steps.values())


def generate(made: Engine, order: list[list[int]], steps: int) -> list[list[int]]:
    """Decode three sequences in alternating batches of some of them."""
    sequences = [made.cache.open() for _ in range(3)]
    outputs = [[int(prefill(made, sequence, IDS[i:]).argmax())] for i, sequence in enumerate(sequences)]
    for _ in range(steps):
        for chosen in order:
            batch = made.cache.batch([sequences[i] for i in chosen])
            logits = made.decode(batch, [outputs[i][-1] for i in chosen])
            for i, row in zip(chosen, logits, strict=True):
                outputs[i].append(int(row.argmax()))
    return outputs


def test_batches_of_one_size_share_a_recording():
    replayed, plain = engine(), engine(graphs=False)
    order = [[0], [1, 2], [2], [2, 0]]
    assert generate(replayed, order, 8) == generate(plain, order, 8)
    assert recordings(replayed) == 2
    assert recordings(plain) == 0
    assert plain.graphs.refused == "graphs are switched off"


def test_a_sequence_that_outgrows_its_index_is_captured_again():
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
    assert batch.index.length_bucket == 256


def test_a_verify_step_is_replayed_for_each_number_of_tokens():
    found = []
    for made in (engine(), engine(graphs=False)):
        sequence = made.cache.open()
        prefill(made, sequence, IDS)
        batch, logits = made.cache.batch([sequence]), []
        for step, count in enumerate([4, 2, 4, 2, 4, 2]):
            length = sequence.length
            logits.append(made.verify(batch, [IDS[step : step + count]]))
            # some are accepted
            sequence.truncate(length + step % 2 + 1)
        found.append(torch.cat(logits))
        assert sum(step.recording is not None for step in made.graphs._verify_steps.values()) == 2 * made.graphs.enabled
    assert torch.equal(*found)


def test_shorter_drafts_are_padded_to_the_longest():
    found = []
    for made in (engine(), engine(graphs=False)):
        sequences = [made.cache.open() for _ in range(3)]
        for number, sequence in enumerate(sequences):
            prefill(made, sequence, IDS[number:])
        batch, logits = made.cache.batch(sequences), []
        before = [sequence.length for sequence in sequences]
        # as on a GPU
        for chunks in ([IDS[:4], IDS[:1], IDS[3:5]], [IDS[:1], IDS[2:6], IDS[:1]], [IDS[:4], IDS[1:5], IDS[2:6]]):
            logits.append(made.graphs.verify(batch, chunks) if made.graphs.enabled else made.verify(batch, chunks))
            assert [sequence.length for sequence in sequences] == [n + len(p) for n, p in zip(before, chunks, strict=True)]
            for sequence, length in zip(sequences, before, strict=True):
                sequence.truncate(length)
        found.append(torch.cat(logits))
        assert sum(step.recording is not None for step in made.graphs._verify_steps.values()) == made.graphs.enabled
    assert torch.equal(*found)


def test_the_recent_window_fills_up_before_it_moves():
    settings = CacheSettings("k8v4", recent_window=32)
    replayed, plain = engine(kv=settings), engine(kv=settings, graphs=False)
    assert generate(replayed, [[0], [1, 2]], 20) == generate(plain, [[0], [1, 2]], 20)


def test_out_of_gpu_memory_is_a_readable_error_and_decode_goes_on(monkeypatch: pytest.MonkeyPatch):
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


def prefill_in_chunks(made: Engine, monkeypatch: pytest.MonkeyPatch, chunks: int) -> torch.Tensor:
    """Return the logits after a prompt whose full chunks are replayed where possible, as on a GPU."""
    monkeypatch.setattr(made, "chunk", len(IDS))
    monkeypatch.setattr(
        made, "_padded_size", lambda batch, counts: len(IDS) if counts == [len(IDS)] and made.graphs.enabled else None
    )
    return prefill(made, made.cache.open(), IDS * chunks + IDS[:3])


@pytest.mark.parametrize("fault", ["rejected", "memory"])
def test_a_prefill_that_cannot_be_captured_runs_all_the_same(fault: str, monkeypatch: pytest.MonkeyPatch):
    made, plain = engine(), engine(graphs=False)

    def capture(work):
        if fault == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return SimpleNamespace(rejected="something was read"), work()

    monkeypatch.setattr(made.graphs, "_capture", capture)
    found = prefill_in_chunks(made, monkeypatch, 4)
    assert torch.equal(found, prefill_in_chunks(plain, monkeypatch, 4))
    assert made.graphs.prefill_refused in ("something was read", "the GPU has no memory for the graph")
    assert made.graphs.refused is None
    assert recordings(made) == 0


def test_prefill_chunks_are_replayed_with_their_own_positions(monkeypatch: pytest.MonkeyPatch):
    made, plain = engine(), engine(graphs=False)
    replayed_positions: list[list[int]] = []

    def capture(work):
        result = work()

        def replay() -> None:
            (step,) = (step for step in made.graphs._steps.values() if step.recording is not None)
            replayed_positions.append(step.positions.tolist())
            result.copy_(work())

        return SimpleNamespace(rejected=None, replay=replay), result

    monkeypatch.setattr(made.graphs, "_capture", capture)
    monkeypatch.setattr(made, "_prefill_batch", lambda sequences, chunks: made.cache.batch(sequences, len(chunks[0])))
    monkeypatch.setattr(plain, "_prefill_batch", lambda sequences, chunks: plain.cache.batch(sequences, len(chunks[0])))
    assert torch.equal(prefill_in_chunks(made, monkeypatch, 5), prefill_in_chunks(plain, monkeypatch, 5))
    # the first two run their Python, then one is replayed after the other
    assert [positions[0] for positions in replayed_positions] == [40, 60, 80]
    assert recordings(made) == 1


@pytest.mark.parametrize("graphs", [True, False])
def test_padding_sequences_change_nothing(graphs: bool):
    """As on a GPU, where batches have few sizes: the output is the same, and padding takes no pages."""
    padded, plain = engine(graphs=graphs), engine(graphs=graphs)
    outputs = {}
    for made, padding_sequences in ((padded, 5), (plain, 0)):
        pair = [made.cache.open(), made.cache.open()]
        for i, sequence in enumerate(pair):
            prefill(made, sequence, IDS[i:])
        batch = made.cache.batch(pair, padding_sequences=padding_sequences)
        outputs[padding_sequences] = [made.decode(batch, [token, token + 1]).argmax(-1).tolist() for token in range(80)]
        for sequence in pair:
            sequence.close()
        assert made.cache.nbytes == 0
    assert outputs[5] == outputs[0]
    assert padded.cache.supports_padding


def test_padded_batches_of_one_size_share_a_recording():
    made = engine()
    pair = [made.cache.open(), made.cache.open()]
    for sequence in pair:
        prefill(made, sequence, IDS)
    for _ in range(3):
        for some, padding_sequences in (([pair[0]], 3), (pair, 2)):
            made.decode(made.cache.batch(some, padding_sequences=padding_sequences), [3] * len(some))
    assert recordings(made) == 1
