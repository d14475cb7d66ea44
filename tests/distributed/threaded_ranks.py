"""Ranks of one model as threads of this process, which start faster than processes and communicate in the same way."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from auraflux.distributed.follower import follow
from auraflux.distributed.parallel import LOCAL, Parallel, parse_parallel
from auraflux.loading.language_model import LanguageModel
from auraflux.loading.load import load

PATIENCE_S = 120.0


class OneRank(Parallel):
    """A group of one rank, to run the code of ranks in one process."""

    def __post_init__(self) -> None:
        """Skip the checks, which refuse one rank."""


def free_port() -> int:
    with socket.create_server((LOCAL, 0)) as listening:
        return listening.getsockname()[1]


def parallel_here(layout: str, port: int, **options: Any) -> Parallel:
    parallel = parse_parallel(layout)
    return replace(parallel, hosts=(f"{LOCAL}:{port}", *[LOCAL] * (parallel.mesh.size - 1)), **options)


@contextmanager
def threaded_ranks(
    path: Path, layout: str, run_follower: Callable[[str, int, Path], None] = follow, **options: Any
) -> Iterator[LanguageModel]:
    """Load a model whose followers are threads."""
    port, failures = free_port(), []

    def run() -> None:
        try:
            run_follower(LOCAL, port, path)
        except Exception as err:
            failures.append(err)

    def start() -> None:
        # rank 0 must listen before a follower can join
        while True:
            try:
                socket.create_connection((LOCAL, port), 1).close()
                break
            except OSError:
                if ended.wait(0.01):
                    return
        run()

    ended = threading.Event()
    threads = [threading.Thread(target=start, daemon=True) for _ in range(parse_parallel(layout).mesh.size - 1)]
    for thread in threads:
        thread.start()
    try:
        model = load(path, parallel=parallel_here(layout, port), **options)
        yield model
        model.engine.ranks.close()
    finally:
        ended.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert failures == []


def decoded(model: LanguageModel, prompts: list[list[int]], steps: int) -> Tensor:
    """Prefill prompts in chunks, two at a time, then decode: the logits of all steps, [steps, B, V]."""
    engine = model.engine
    sequences = [engine.cache.open() for _ in prompts]
    for start in range(0, max(map(len, prompts)), 5):
        chunks = [(s, p[start : start + 5]) for s, p in zip(sequences, prompts, strict=True) if start < len(p)]
        for at in range(0, len(chunks), 2):
            engine.prefill([s for s, _ in chunks[at : at + 2]], [chunk for _, chunk in chunks[at : at + 2]])
    batch, found = engine.decode_batch(sequences), []
    ids = [prompt[-1] for prompt in prompts]
    for _ in range(steps):
        found.append(engine.decode(batch, ids).clone())
        ids = found[-1].argmax(-1).tolist()
    for sequence in sequences:
        sequence.close()
    return torch.stack(found)
