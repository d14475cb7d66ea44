"""Logits are bit-equal wherever a prompt is cut into steps, in families whose layers read tokens in groups or with states."""

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from tests.models.oracles import loaded, save, tokens
from tests.models.test_axk2 import axk2
from tests.models.test_bailing_hybrid import bailing
from tests.models.test_deepseek_v4 import deepseek
from tests.models.test_flex_olmo import flex_olmo
from tests.models.test_llama4_text import llama4
from tests.models.test_minimax import minimax
from tests.models.test_phimoe import phimoe

COUNT = 200  # tokens, past three pages
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "deepseek_v4": (deepseek, "none"),
    "axk2": (axk2, "k8v4"),
    "bailing_hybrid": (bailing, "k8v4"),
    "flex_olmo": (flex_olmo, "k8v4"),
    "llama4_text": (llama4, "k8v4"),
    "minimax": (minimax, "k8v4"),
    "phimoe": (phimoe, "k8v4"),
}


def cuts() -> list[list[int]]:
    chosen = random.Random(0)
    return [[1], [63], [65], [127, 130], *(sorted(chosen.sample(range(1, COUNT), 5)) for _ in range(4))]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "rounded"])
def test_steps_of_any_lengths_give_the_same_bits(name: str, exact: bool, tmp_path: Path):
    make, kv = MODELS[name]
    model = make()
    mine, ids = loaded(save(model, tmp_path)), tokens(model, COUNT)
    engine = Engine(mine.model, mine.shapes, CacheSettings(kv), context=256, chunk=256, exact=exact)
    found: list[torch.Tensor] = []
    for ends in [[], *cuts()]:
        sequence = engine.cache.open()
        steps = pairwise([0, *ends, COUNT])
        found.append(torch.cat([engine.all_logits(sequence, ids[start:end]) for start, end in steps]))
        sequence.close()
    assert [ends for ends, each in zip(cuts(), found[1:], strict=True) if not torch.equal(each, found[0])] == []
