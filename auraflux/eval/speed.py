"""Prefill and decode speed of a model at a given context length."""

import time

import torch

from auraflux.eval.scorer import EngineScorer

DECODED_TOKENS = 16
WARM_UP = 8


def speed(scorer: EngineScorer, ids: list[int]) -> dict[str, float]:
    """Return prefill and decode tokens per second, the better of two rounds: the first may have to compile."""
    first, second = _round(scorer, ids), _round(scorer, ids)
    return {name: max(first[name], second[name]) for name in first}


def _round(scorer: EngineScorer, ids: list[int]) -> dict[str, float]:
    engine = scorer.engine
    scorer.clear()
    sequence = engine.cache.open()
    try:
        began = _now(engine.device)
        for start in range(0, len(ids), engine.chunk):
            engine.prefill([sequence], [ids[start : start + engine.chunk]])
        prefilled = _now(engine.device)
        batch = engine.decode_batch([sequence])
        token = ids[-1:]
        for _ in range(WARM_UP):
            token = engine.decode(batch, token).argmax(-1)[:1].tolist()
        warm = _now(engine.device)
        for _ in range(DECODED_TOKENS):
            token = engine.decode(batch, token).argmax(-1)[:1].tolist()
        done = _now(engine.device)
    finally:
        sequence.close()
    return {"prefill_tokens_per_s": len(ids) / (prefilled - began), "decode_tokens_per_s": DECODED_TOKENS / (done - warm)}


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
