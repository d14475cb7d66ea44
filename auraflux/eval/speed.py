"""How fast a model reads and writes with a cache that holds so many tokens already."""

import time

import torch

from auraflux.eval.reader import EngineReader

WRITTEN = 16  # tokens
WARM_UP = 8


def speed(reader: EngineReader, ids: list[int]) -> dict[str, float]:
    """Time reading a text, and writing after it: tokens per second, the better of two rounds. The first may have to compile."""
    first, second = _round(reader, ids), _round(reader, ids)
    return {name: max(first[name], second[name]) for name in first}


def _round(reader: EngineReader, ids: list[int]) -> dict[str, float]:
    engine = reader.engine
    reader.forget()
    sequence = engine.cache.open()
    try:
        began = _now(engine.device)
        for start in range(0, len(ids), engine.chunk):
            engine.read([sequence], [ids[start : start + engine.chunk]])
        read = _now(engine.device)
        batch = engine.writing([sequence])
        token = ids[-1:]
        for _ in range(WARM_UP):
            token = engine.decode(batch, token).argmax(-1)[:1].tolist()
        warm = _now(engine.device)
        for _ in range(WRITTEN):
            token = engine.decode(batch, token).argmax(-1)[:1].tolist()
        done = _now(engine.device)
    finally:
        sequence.close()
    return {"prefill_tokens_per_s": len(ids) / (read - began), "decode_tokens_per_s": WRITTEN / (done - warm)}


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
