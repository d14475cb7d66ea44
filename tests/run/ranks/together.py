"""Ranks of one model in this process, each on a thread: what they say is what processes say, and they start at once."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from auraflux.run.language import LanguageModel
from auraflux.run.load import load
from auraflux.run.ranks.follow import follow
from auraflux.run.ranks.parallel import LOCAL, Parallel, parse_parallel

PATIENCE_S = 120.0


class OneRank(Parallel):
    """A group of one, which is of no use but that its rank does all that ranks do."""

    def __post_init__(self) -> None:
        """Refuse nothing."""


def free_port() -> int:
    with socket.create_server((LOCAL, 0)) as listening:
        return listening.getsockname()[1]


def parallel_here(way: str, port: int, **options: Any) -> Parallel:
    asked = parse_parallel(way)
    return replace(asked, hosts=(f"{LOCAL}:{port}", *[LOCAL] * (asked.mesh.size - 1)), **options)


@contextmanager
def together(
    path: Path, way: str, take_part: Callable[[str, int, Path], None] = follow, **options: Any
) -> Iterator[LanguageModel]:
    """A model whose other ranks are threads."""
    port, failures = free_port(), []

    def run() -> None:
        try:
            take_part(LOCAL, port, path)
        except Exception as err:
            failures.append(err)

    def start() -> None:
        # rank 0 must listen before anybody can come
        while True:
            try:
                socket.create_connection((LOCAL, port), 1).close()
                break
            except OSError:
                if ended.wait(0.01):
                    return
        run()

    ended = threading.Event()
    threads = [threading.Thread(target=start, daemon=True) for _ in range(parse_parallel(way).mesh.size - 1)]
    for thread in threads:
        thread.start()
    try:
        model = load(path, parallel=parallel_here(way, port), **options)
        yield model
        model.engine.ranks.close()
    finally:
        ended.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert failures == []


def decoded(model: LanguageModel, prompts: list[list[int]], steps: int) -> Tensor:
    """Read prompts in pieces, two at a time, then write one token of each: the scores of all steps, [steps, B, V]."""
    engine = model.engine
    sequences = [engine.cache.open() for _ in prompts]
    for start in range(0, max(map(len, prompts)), 5):
        reading = [(s, p[start : start + 5]) for s, p in zip(sequences, prompts, strict=True) if start < len(p)]
        for at in range(0, len(reading), 2):
            engine.read([s for s, _ in reading[at : at + 2]], [piece for _, piece in reading[at : at + 2]])
    batch, found = engine.writing(sequences), []
    ids = [prompt[-1] for prompt in prompts]
    for _ in range(steps):
        found.append(engine.decode(batch, ids).clone())
        ids = found[-1].argmax(-1).tolist()
    for sequence in sequences:
        sequence.close()
    return torch.stack(found)
