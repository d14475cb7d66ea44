"""Complete evaluations of a tiny model."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from auraflux.cache.key_calibration import ModelCalibration
from auraflux.engine.calibrate import calibrate_keys, random_tokens
from auraflux.errors import InputError
from auraflux.eval.metrics import summary
from auraflux.eval.needle import haystack
from auraflux.eval.run import Evaluation, Tasks
from auraflux.eval.scorer import EngineScorer, differences
from auraflux.eval.setting import parse
from auraflux.eval.state import State
from auraflux.eval.text import copies, read_files, tokenized, windows
from auraflux.loading.load import load
from auraflux.weights.download.pull import models_folder
from tests.eval.tiny_heads import loaded


def plan() -> Tasks:
    tokenizer = loaded().tokenizer
    assert tokenizer is not None
    files = tokenized(read_files([]), tokenizer, chat=False)
    return Tasks(windows(files, 200, 3), copies(files, [150], 64), {400: [haystack(files[0], tokenizer, 400, 0)]})


@cache
def calibration(bits: int | None = None) -> ModelCalibration:
    engine = loaded().engine
    return calibrate_keys(
        engine.model, engine.cache.shapes, random_tokens(128, engine.model.config.vocab), torch.float32, "cpu"
    )


def scorer(name: str) -> EngineScorer:
    setting, base = parse(name), loaded().engine
    shapes, used = setting.shapes(base.cache.shapes), setting.calibration(calibration)
    return EngineScorer(base, shapes, setting.cache, 600, exact=True, key_calibration=used)


def run(path: Path, names: str, report: Any = lambda *_: None) -> list[dict[str, Any]]:
    settings = [parse(name) for name in names.split(",")]
    state = State(path)
    try:
        return Evaluation(lambda bits: loaded().engine, calibration, settings, plan(), state, True, report).run()
    finally:
        state.close()


def test_uncompressed_results_match_the_forward_pass():
    passage = plan().windows[0]
    ids = list(passage.ids)
    wanted = torch.log_softmax(loaded().logits(ids)[:-1], -1)
    forward = -wanted.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
    none = scorer("none")
    assert differences(none, {"none": none}, passage)["none"].nll == pytest.approx(forward.tolist(), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    "name",
    ["none", "k4v4", "k4v4+sink_tokens=0+recent_window=0+calibrate=off", "k4v4+sink_tokens=0+recent_window=0", "kivi4", "fp8"],
)
def test_a_setting_does_not_differ_from_itself(name: str):
    found = differences(scorer(name), {"again": scorer(name)}, plan().windows[0])["again"]
    assert max(found.kl) < 1e-9
    assert min(found.same) == 1


def test_more_bits_are_nearer():
    names = ["k8v8", "k6v6", "k4v4", "k3v3", "k2v2"]
    none = scorer("none")
    found = [differences(none, {name: scorer(name) for name in names}, passage) for passage in plan().windows]
    means = [summary(sum((each[name] for each in found[1:]), found[0][name]))["kl_mean"] for name in names]
    assert means == sorted(means)
    assert means[0] < means[-1] / 10


def test_a_resumed_run_has_the_same_result(tmp_path: Path):
    names = "none,k4v4,q4_0"
    uninterrupted = run(tmp_path / "whole", names)
    reports: list[tuple[str, int, int]] = []

    def interrupt(*what: Any) -> None:
        reports.append(what)
        if len(reports) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", names, interrupt)
    saved = (tmp_path / "parts").read_bytes()
    assert 0 < saved.count(b"\n") < (tmp_path / "whole").read_bytes().count(b"\n")
    # as after a kill during a write
    (tmp_path / "parts").write_bytes(saved + saved[:100])
    assert run(tmp_path / "parts", names, lambda *what: reports.append(what)) == uninterrupted
    assert reports[4][1] == saved.count(b"\n")
    assert reports[-1] == ("done", 15, 15)


@pytest.mark.parametrize(
    "line", ["5", "[]", "{}", '{"setting": [], "task": "b", "result": 1}', '{"setting": "a", "task": "b"}']
)
def test_an_invalid_line_is_discarded(line: str, tmp_path: Path):
    path = tmp_path / "state"
    state = State(path)
    state.add("a", "b", 1)
    state.close()
    path.write_text(path.read_text() + line + "\n")
    again = State(path)
    assert len(again) == 1
    again.add("a", "c", 2)
    again.close()
    assert path.read_text().count("\n") == 2


def test_two_runs_do_not_share_a_file(tmp_path: Path):
    path = tmp_path / "state"
    state = State(path)
    state.add("a", "b", 1)
    with pytest.raises(InputError, match="another run of the same evaluation"):
        State(path)
    state.close()
    again = State(path)
    assert again["a", "b"] == 1
    again.remove()
    assert not path.exists()


def test_a_needle_has_the_likelihood_of_the_forward_pass():
    hidden = plan().needles[400][0]
    ending, shared = hidden.endings[0][0], hidden.shared[0]
    ids = [*hidden.prompt, *ending]
    log = torch.log_softmax(loaded().logits(ids), -1)
    wanted = sum(float(log[at - 1, ids[at]]) for at in range(len(hidden.prompt) + shared, len(ids)))
    assert scorer("none").likelihoods(hidden.prompt, [ending], shared) == pytest.approx([wanted], rel=1e-4)


@pytest.mark.slow
def test_more_bits_are_nearer_in_a_real_model():
    if not list(models_folder().glob("smollm2*")):
        pytest.skip("SmolLM2 is not downloaded")
    base = load(kv="none", exact=True, context=64, device="cpu")
    files = tokenized(read_files([]), base.tokenizer, chat=False)
    names = ["k8v8", "k8v4", "k4v4", "k3v3", "fp8", "q4_0"]
    settings = {name: parse(name) for name in ["none", *names]}
    scorers = {
        name: EngineScorer(base.engine, each.shapes(base.engine.cache.shapes), each.cache, 256, True)
        for name, each in settings.items()
    }
    found = differences(scorers["none"], scorers, windows(files, 256, 1)[0])
    means = [summary(found[name])["kl_mean"] for name in names[:4]]
    assert means == sorted(means)
    # the bounds of docs/quality.md, on fewer tokens
    assert means[1] < 0.0015
    assert means[2] < 0.004
    assert means[3] < 0.016
    assert means[2] < summary(found["fp8"])["kl_mean"] < 0.02 < summary(found["q4_0"])["kl_mean"]
