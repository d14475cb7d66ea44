"""`auraflux generate` and `auraflux chat`: output on stdout, statistics on stderr, one sentence per error."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from auraflux.cli import main
from tests.engine.tiny import tiny

SMALL = ["--context", "64", "--device", "cpu"]


def run(*words: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], input=stdin)


def broken(folder: Path, damage: Callable[[Path], object]) -> Path:
    """Return a copy of the tiny model with a fault."""
    shutil.copytree(tiny(), folder)
    damage(folder)
    return folder


def without(key: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        del config[key]
        (folder / "config.json").write_text(json.dumps(config))

    return damage


def template(source: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def misshapen(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"] = tensors["model.layers.0.self_attn.q_proj.weight"][:32].clone()
    tensors["extra"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors")


FAULTS = {
    "no-config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "no-key": (without("rms_norm_eps"), "has no 'rms_norm_eps'. The keys it has:"),
    "cut": (cut, "cannot be read"),
    "misshapen": (
        misshapen,
        "1 missing: model.layers.1.mlp.up_proj.weight; 1 of the wrong shape: model.layers.0.self_attn.q_proj.weight has shape "
        "[32, 64], [64, 64] is needed; 1 that the model does not know: extra.",
    ),
    "template": (template("{% for"), "The chat template has an error"),
    "hostile-template": (template("{{ ''.__class__.__mro__ }}"), "is unsafe"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_model_is_one_sentence(fault: str, tmp_path: Path):
    damage, message = FAULTS[fault]
    result = run("generate", broken(tmp_path / "model", damage), "--chat", "-p", "hi", *SMALL)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "nowhere/at/all"], "there is no model 'nowhere/at/all'"),
        (["generate", tiny()], "there is no prompt"),
        (["generate", tiny(), "-p", "hello " * 90, *SMALL], "and the context is limited to 64"),
        (["generate", tiny(), "-p", "x", "--kv", "k9v1"], "kv='k9v1' is not supported"),
        (["generate", tiny(), "-p", "x", "--top-p", "7"], "top_p=7.0 must be above 0"),
        (["bench", "model", tiny(), "--at", "5000"], "does not fit the context of 512"),
    ],
)
def test_a_wrong_request_is_one_sentence(words: list[str], message: str):
    words = [*words, "-p", "x"] if words[:2] == ["generate", "nowhere/at/all"] else words
    result = run(*words)
    assert result.exit_code == 1
    assert message in result.stderr


def test_output_is_on_stdout_and_statistics_on_stderr():
    result = run("generate", tiny(), "-p", "The quick", "-n", "5", *SMALL)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip()
    assert "generated 5 tokens" in result.stderr
    assert result.stderr.startswith("temperature 0.7 (default) · prompt")
    assert re.search(
        r"KV cache [\d.]+ [kM]B \(k4v4\) of [\d.]+ [kM]B allocated, [\d.]+x smaller than uncompressed", result.stderr
    )


def test_json_has_outputs_and_statistics():
    result = run("generate", tiny(), "-p", "The quick", "-p", "x", "-n", "5", "--json", *SMALL)
    found = json.loads(result.stdout)
    assert len(found["texts"]) == 2
    assert found["stats"]["tokens"] == 10
    assert found["stats"]["steps"] == 10
    assert found["stats"]["invariant"] is False


def test_statistics_report_draft_tokens_and_batch_invariance():
    text = "the cat sat on the mat and the cat sat on the mat and the cat sat on the"
    result = run("generate", tiny(), "-p", text, "-n", "40", "-t", "0", "--speculate", "ngram", "--invariant", *SMALL)
    assert result.stderr.rstrip().endswith(" · batch-invariant")
    found = json.loads(run("generate", tiny(), "-p", "x", "-n", "4", "--invariant", "--json", *SMALL).stdout)["stats"]
    assert found["invariant"] is True
    assert (found["steps"], found["drafted"], found["accepted"]) == (4, 0, 0)


def test_the_prompt_may_come_from_stdin():
    typed = run("generate", tiny(), "-p", "fox", "-n", "4", "-t", "0", *SMALL)
    assert run("generate", tiny(), "-p", "-", "-n", "4", "-t", "0", *SMALL, stdin="fox").stdout == typed.stdout


def test_chat_answers_resets_and_exits():
    lines = "hello\n/stats\n/reset\n/nothing\n/help\nhello\n/exit\nnever read\n"
    result = run("chat", tiny(), "-n", "4", "-t", "0", *SMALL, stdin=lines)
    assert result.exit_code == 0, result.stderr
    half = len(result.stdout) // 2
    assert result.stdout[:half] == result.stdout[half:] != ""
    for said in ("Conversation cleared.", "unknown command /nothing", "Ctrl-C stops an answer"):
        assert said in result.stderr


def test_a_prompt_beyond_the_context_does_not_end_the_chat():
    result = run("chat", tiny(), "-n", "4", *SMALL, stdin="word " * 90 + "\nhello\n")
    assert result.exit_code == 0
    assert "error: the prompt has" in result.stderr
    assert result.stdout.strip()


def test_bench_model_prints_rates():
    result = run("bench", "model", tiny(), "--at", "16", "--tokens", "4", "--repeat", "1", "--json", *SMALL)
    found = json.loads(result.stdout)
    assert [row["context"] for row in found["results"]] == [16]
    assert found["results"][0]["decode_rate"] > 0
