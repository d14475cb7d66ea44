"""Greedy tokens of this package after a prompt with images."""

from pathlib import Path

from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from auraflux.engine.request import Output, Request
from auraflux.engine.sampling import Sampling
from auraflux.scheduler.scheduler import Scheduler
from auraflux.vision.families import Vision
from auraflux.vision.span import ImageSpan
from tests.models.oracles import loaded

COUNT = 20


def greedy_tokens(folder: Path, vision: Vision, ids: list[int], spans: tuple[ImageSpan, ...]) -> list[int]:
    """Generate `COUNT` tokens with the model of a folder, prefilling in chunks of 32 tokens."""
    source = loaded(folder)
    engine = Engine(source.model, source.shapes, CacheSettings("none"), context=512, chunk=32, exact=True)
    engine.vision = vision
    serving, kept = Scheduler(engine, None, frozenset(), max_sequences=2), list[Output]()
    serving.submit(Request(tuple(ids), Sampling(temperature=0, max_tokens=COUNT), images=spans), kept.append)
    while serving.step():
        pass
    assert kept[-1].error is None
    return [token for output in kept for token in output.tokens]
