"""`auraflux bench stream`: output and cleanup."""

import json
import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from auraflux.bench.offload import contenders, measure
from auraflux.cli import main
from auraflux.cli.bench.stream import parse_budget
from auraflux.errors import InputError

TINY = ["--shape", "256,128,8,2", "--layers", "2", "--tokens", "3", "--repeat", "1", "--budget", "50%"]


def call(*words: object) -> Result:
    return CliRunner().invoke(main, ["bench", "stream", *(str(word) for word in words)])


@pytest.fixture(autouse=True)
def short(monkeypatch) -> None:
    monkeypatch.setattr(contenders, "RAW_S", 0.01)


def test_tables_with_bars(tmp_path):
    done = call(*TINY, "--scratch", tmp_path)
    assert done.exit_code == 0, done.output
    for words in ("256,128,8,2: 2 layers of 8 experts of 0.06 MB, 2 for each token", "uniform choice", "zipf choice", "█"):
        assert words in done.stdout
    assert not list(tmp_path.iterdir())


def test_json_that_is_also_saved(tmp_path):
    scratch, target = tmp_path / "scratch", tmp_path / "results"
    scratch.mkdir()
    target.mkdir()
    done = call(*TINY, "--scratch", scratch, "--trace", "zipf", "--json", "--save", target)
    found = json.loads(done.stdout)
    assert (found["layers"], found["budget_nbytes"], found["shape"]["k"]) == (2, found["nbytes"] // 2, 2)
    assert {row["trace"] for row in found["results"]} == {"zipf"}
    assert {"streamed", "without hits first", "without prefetch", "mapped"} <= {row["who"] for row in found["results"]}
    (saved,) = target.iterdir()
    assert saved.name.startswith("stream-")
    assert json.loads(saved.read_text()) == found
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("ending", [KeyboardInterrupt, InputError("no more"), signal.SIGTERM])
def test_temporary_files_are_always_removed(ending, tmp_path, monkeypatch):
    def stop(*args: object) -> None:
        assert list(tmp_path.iterdir())
        if isinstance(ending, signal.Signals):
            os.kill(os.getpid(), ending)
        else:
            raise ending

    monkeypatch.setattr(measure.Runner, "run", stop)
    before = signal.getsignal(signal.SIGTERM)
    assert call(*TINY, "--scratch", tmp_path).exit_code in (1, 130, 128 + signal.SIGTERM)
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is before


def test_failures_are_one_sentence(tmp_path):
    for words, message in (
        (["--shape", "400b"], "'400b' is not a shape"),
        (["--scratch", tmp_path / "nowhere"], "there is no folder"),
        (["--budget", "much"], "'much' is not a size"),
        (["--budget", "101%"], "--budget '101%' is no share"),
        (["--budget", "1%"], "for experts is too little"),
        (["--save", tmp_path / "nowhere" / "file.json"], "cannot save to"),
    ):
        done = call(*TINY, "--scratch", tmp_path, *words)
        assert done.exit_code == 1
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
        assert not list(tmp_path.iterdir())


def test_budgets():
    assert parse_budget("25%", 1000) == 250
    assert parse_budget("1.5GB", 1000) == 1_500_000_000
    with pytest.raises(InputError, match="is no share"):
        parse_budget("x%", 1000)


def test_a_folder_to_save_to_must_be_there(tmp_path: Path):
    assert call(*TINY, "--scratch", tmp_path, "--save", tmp_path / "a" / "b.json").exit_code == 1
