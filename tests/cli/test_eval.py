"""`auraflux eval`: table, JSON and plots; errors in one sentence."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from auraflux.cli import main
from auraflux.eval.peers import PEERS
from auraflux.eval.setting import CHANGES
from tests.eval.test_tools import record, write_lines
from tests.eval.tiny_heads import tiny_heads

SHORT = ["--device", "cpu", "--window", "100", "--windows", "2", "--copy", "150", "--needle", "400", "--speed", "32"]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("auraflux.machine.cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["eval", str(tiny_heads()), *map(str, words)])


def test_results_are_shown_and_saved(tmp_path: Path, cache_folder: Path):
    found = run(*SHORT, "--kv", "none,k4v4", "--peers", "--save", tmp_path / "out")
    assert found.exit_code == 0, found.output
    for words in ("KL mean", "FP8 e4m3 (simulated)", "probability of the right fact", "decode after 32"):
        assert words in found.output
    document = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert document["tokens"] == 2 * 99
    rows = {row["setting"]: row for row in document["results"]}
    assert rows["none"]["text"]["kl_mean"] == 0
    assert 0 < rows["fp8"]["text"]["kl_mean"] < rows["kivi2"]["text"]["kl_mean"]
    assert rows["k4v4"]["token_nbytes"] == 2 * 72
    assert rows["fp8"]["speed"] == {}
    for name in ("kl", "memory", "needle"):
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    # a finished run is not resumed
    assert list((cache_folder / "eval").iterdir()) == []


def test_function_calls_are_measured(tmp_path: Path):
    questions = write_lines(tmp_path / "q.json", *map(record, range(5)))
    few = ["--device", "cpu", "--window", "100", "--windows", "1", "--copy", "none", "--needle", "none", "--speed", "none"]
    settings = "none,fp8,k4v4"
    found = run(*few, "--kv", settings, "--tools", "800,900", "--questions", questions, "--save", tmp_path / "out")
    assert found.exit_code == 0, found.output
    assert "complete call" in found.output
    assert (tmp_path / "out" / "tools.png").read_bytes().startswith(b"\x89PNG")
    none, near, far = (row["tools"] for row in json.loads((tmp_path / "out" / "eval.json").read_text())["results"])
    for length in ("800", "900"):
        assert (none[length]["questions"], none[length]["kl_mean"], none[length]["unbroken"]) == (5, 0, 1)
        assert 0 < near[length]["kl_mean"] < far[length]["kl_mean"]
    found = run(*few, "--tools", "100", "--questions", questions)
    assert found.exit_code == 1
    assert "conversations of 100 tokens leave" in found.output


def test_json_in_chat_format_with_quantized_weights():
    few = ["--device", "cpu", "--window", "100", "--windows", "1", "--copy", "none", "--needle", "none", "--speed", "none"]
    found = run(*few, "--kv", "none,none+quantize=4", "--chat", "--json")
    assert found.exit_code == 0, found.output
    plain, rounded = json.loads(found.stdout)["results"]
    assert plain["text"]["kl_mean"] == 0 < rounded["text"]["kl_mean"]
    assert plain["token_nbytes"] == rounded["token_nbytes"]


def test_help_names_all_settings_and_changes():
    said = set(run("--help").output.replace(",", " ").replace(".", " ").split())
    assert {*PEERS, *CHANGES} <= said


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"Too short.", "fewer than one window of 100"),
        (b"\xff\xfe\x00text", "is no text: byte 0 is not UTF-8"),
        (b"text\0text", "is no text: it has zero bytes"),
        (None, "cannot be read: No such file"),
    ],
)
def test_unusable_files_are_refused_in_one_sentence(tmp_path: Path, content: bytes | None, match: str):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    found = run(*SHORT, "--text", path)
    assert found.exit_code == 1
    assert match in found.output
    assert len(found.output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "match", "code"),
    [
        (["--kv", "k9v9"], "kv='k9v9'", 1),
        (["--kv", "best"], "there is no setting 'best'", 1),
        (["--window", "5000"], "5000 tokens exceed the model's context of 1024", 1),
        (["--needle", "few"], "neither 'none' nor comma-separated numbers", 2),
        (["--kv", "none,k4v4+skip_first_layers=2"], "would quantize nothing", 1),
        (["--calibrate", "off"], "give --kv k4v4+calibrate=off", 1),
        (["--calibrate", "nothing"], "nothing cannot be read: No such file", 1),
    ],
)
def test_invalid_settings_are_refused_in_one_sentence(words: list[str], match: str, code: int):
    found = run(*SHORT, *words)
    assert found.exit_code == code
    assert match in found.output


def test_tasks_need_lm_eval(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    done = CliRunner().invoke(main, ["eval", "--task", "arc_easy"])
    assert done.exit_code == 1
    assert done.stderr.startswith("error: --task needs lm-eval: pip install 'lm-eval[api]'")
