"""All kernels of a model are compiled before its first step."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from auraflux import load
from auraflux.cache import AttentionShape, CacheSettings
from auraflux.engine import compile_kernels
from auraflux.engine.compile_kernels import kernels_of
from auraflux.ops.simd.jit import Kernel

TRAINED = Path(__file__).parents[2] / "bench" / "trained" / "snapshots"


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "qwen3_5_moe", "qwen3_moe"])
def test_generation_needs_no_other_kernels(name: str, monkeypatch: pytest.MonkeyPatch):
    model = load(TRAINED / name, device="cpu", graphs=False)
    engine, run, used = model.engine, Kernel.__call__, set()

    def call(kernel: Kernel, *args: int | float) -> None:
        used.add(kernel)
        run(kernel, *args)

    monkeypatch.setattr(Kernel, "__call__", call)
    for _ in model.generate(
        "It was a long time ago, and nobody remembers", max_tokens=3, temperature=0.8, repetition_penalty=1.1
    ):
        pass
    settings = {"exact": False, "calibrate": True, "dtype": torch.float32}
    first, needed, later = kernels_of(engine.model, engine.cache.shapes, engine.cache.settings, **settings)
    assert {kernel.body.__qualname__ for kernel in used - {*needed, *later}} == set()
    assert len(used) > 10
    # calibration runs before the kernels of quantized attention are compiled, which take longest
    assert {kernel.body.__name__ for kernel in first} & {"attend", "attend_window", "append_rows"} == set()
    assert bool(first) == any(type(shape) is AttentionShape for shape in engine.cache.shapes)
    assert set(first) < set(needed)


def test_kernels_are_listed_until_all_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Stored(NamedTuple):
        name: str

        def is_cached(self) -> bool:
            return self.name in stored

    model = SimpleNamespace(config="a model", layers=[torch.zeros(2)])
    chosen, settings, stored = {"exact": False, "calibrate": True, "dtype": torch.float32}, CacheSettings("k4v4"), {"a", "b"}
    found, listed = ([Stored("a")], [Stored("a"), Stored("b")], [Stored("c")]), []
    monkeypatch.setattr(compile_kernels, "CACHE_FOLDER", str(tmp_path))
    monkeypatch.setattr(compile_kernels, "kernels_of", lambda *args, **options: listed.append(args) or found)

    def missing(**changed: Any) -> Any:
        return compile_kernels._missing(model, [], changed.pop("settings", settings), {**chosen, **changed})

    assert (missing(), missing()) == (found, found)
    stored.add("c")
    assert (missing(), missing(), len(listed)) == (found, ([], [], []), 3)
    # another model, another KV cache and other settings have kernels of their own
    assert missing(settings=CacheSettings("k8v4")) == missing(exact=True) == found
    model.layers = [torch.zeros(3)]
    assert missing() == found
    monkeypatch.setattr(compile_kernels, "CACHE_FOLDER", "")
    assert missing() == missing() == found
