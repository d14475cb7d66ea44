"""Invalid command lines, settings and streams: one sentence, the right exit code, never a traceback."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import auraflux
from auraflux.cache import CacheSettings
from auraflux.cli import main
from auraflux.engine.sampling import Sampling
from auraflux.errors import AurafluxError, FormatError, InputError, SettingsError
from auraflux.loading.model_loader import ModelLoader
from tests.engine.tiny import tiny
from tests.weights.formats.gguf_files import llama_tensors, write_gguf

KEEP = ("-n", "2", "--context", "64")
NO_FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
UNWRITABLE = [
    pytest.param("&-", "Bad file descriptor", id="closed"),
    pytest.param("/dev/full", "No space left on device", marks=NO_FULL, id="full"),
]


def shell(words: list[Any], redirected: str) -> subprocess.CompletedProcess[str]:
    command = " ".join(shlex.quote(str(word)) for word in (sys.executable, "-m", "auraflux", *words))
    return subprocess.run(f"{command} {redirected}", shell=True, capture_output=True, text=True, check=False)


def refused(*words: Any) -> str:
    """Run a command that fails; return its error message."""
    done = CliRunner().invoke(main, list(map(str, words)))
    assert done.exit_code == 1, done.output
    # compiling kernels shows its progress on a slow machine
    said = "".join(line for line in done.stderr.splitlines(keepends=True) if not line.startswith("compiling kernels: "))
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert len(said) < 500
    return said


@pytest.mark.parametrize("words", [["generate", "-p", "-"], ["chat"]])
def test_a_closed_stdin_is_one_sentence(words: list[str]):
    done = shell([*words, tiny()], "<&-")
    assert (done.returncode, done.stderr) == (1, "error: stdin is closed, so nothing can be read from it.\n")


def test_binary_stdin_is_one_sentence():
    octets = shlex.quote("\\377")
    command = (
        f"printf {octets} | PYTHONUTF8=0 LC_ALL=C.UTF-8 PYTHONIOENCODING=utf-8:strict {sys.executable} -m auraflux generate"
    )
    done = subprocess.run(f"{command} -p - {tiny()}", shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: stdin is not text: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("where", "why"), UNWRITABLE)
@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], *(pytest.param(["inspect", tiny(), *how], marks=pytest.mark.slow) for how in ([], ["--json"]))],
)
def test_output_that_cannot_be_written_is_one_sentence(words: list[Any], where: str, why: str):
    done = shell(words, f">{where}")
    assert (done.returncode, done.stderr) == (1, f"error: the output cannot be written: {why}.\n")
    assert shell(words, f">{where} 2>{where}").returncode == 1


@pytest.mark.parametrize(("where", "why"), UNWRITABLE)
def test_streamed_output_that_cannot_be_written_is_one_sentence(where: str, why: str):
    done = shell(["generate", tiny(), "-p", "The quick", *KEEP], f">{where}")
    assert done.returncode == 1
    assert done.stderr.endswith(f"error: the output cannot be written: {why}.\n")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["ops", "--case", "x" * 5000], ["stream", "--scratch", "a\nb"]])
def test_long_input_is_truncated_in_messages(words: list[str]):
    done = CliRunner().invoke(main, ["bench", *words])
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert len(done.stderr) < 1600


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 300 + "/y", "~nosuchuser/x", "a\nb"])
@pytest.mark.parametrize("command", [["generate", "-p", "a"], ["inspect"], ["pull"]])
def test_names_that_cannot_be_paths(command: list[str], name: str):
    assert "there is no model " in refused(command[0], name, *command[1:])


@pytest.mark.parametrize("command", [["generate", "-p", "a"], ["inspect"], ["pull"]])
def test_a_name_that_is_empty(command: list[str]):
    assert "the model's name is empty" in refused(command[0], "", *command[1:])


def test_a_destination_that_cannot_be(tmp_path: Path):
    assert "File name too long" in refused("convert", tiny(), tmp_path / ("x" * 300))
    assert "Not a directory" in refused("convert", tiny(), "/dev/null/x")
    assert "/ is no name of a new folder" in refused("convert", tiny(), "/")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--context", "99999999999"], "context=99999999999 needs "),
        (["--context", "1" + "0" * 30], "must be an integer from 1 to 1,099,511,627,776"),
        (["--context", "0"], "context=0 must be an integer"),
        (["--recent-window", "1" + "0" * 20], "recent_window=100000000000000000000 is more than"),
        (["--sparse-v", "nan"], "sparse_v=nan is a share of the attention weights"),
        (["--temperature", "1e400"], "temperature=inf must be from 0 to 1,000,000"),
        (["--frequency-penalty", "-1e300"], "frequency_penalty=-1e+300 must be from -1,000 to 1,000"),
        (["--repetition-penalty", "nan"], "repetition_penalty=nan must be above 0"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "\udcff"], "invalid UTF-8 at character 0"),
        (["--hosts", "10.0.0.1,10.0.0.2"], "--hosts needs --parallel"),
    ],
)
def test_extreme_options(options: list[str], said: str):
    prompt = [] if "--prompt" in options else ["-p", "a"]
    assert said in refused("generate", tiny(), *prompt, "-n", "2", *options)


@pytest.mark.parametrize("option", ["--grace", "--deadline"])
@pytest.mark.parametrize("seconds", ["nan", "inf", "-1"])
def test_seconds_of_a_server(option: str, seconds: str):
    assert f"{option} {seconds} must be from 0 to 604,800 seconds" in refused("serve", tiny(), option, seconds)


def test_empty_texts_of_a_server():
    assert "--api-key is empty" in refused("serve", tiny(), "--api-key", "")
    assert "--name is empty" in refused("serve", tiny(), "--name", " ")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"speculate": "/nowhere"}, "there is no model '/nowhere'"),
        ({"calibrate": "/nowhere"}, "/nowhere cannot be read"),
        ({"prefix_disk": "much"}, "'much' is not a size"),
    ],
)
def test_settings_are_checked_before_weights_are_read(given: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ModelLoader, "run", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(AurafluxError, match=re.escape(said)):
        auraflux.load(tiny(), device="cpu", context=64, **given)


def test_bits_are_checked_before_quantized_weights_are_loaded(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", llama_tensors(), "Q8_0", tokenizer=True)
    with pytest.raises(FormatError, match="99 bits in groups of 64 is not a format"):
        auraflux.load(path, quantize=99, device="cpu", context=64)


@pytest.mark.parametrize(
    "given",
    [
        {"stop": 5},
        {"stop": ["a", 5]},
        {"stop": [""]},
        {"stop": {"a"}},
        {"temperature": 10**400},
        {"temperature": True},
        {"temperature": "1"},
        {"top_p": 10**400},
        {"presence_penalty": 1e300},
        {"frequency_penalty": -1e300},
        {"logit_bias": {1: 10**400}},
        {"logit_bias": {1: 10**30}},
        {"seed": 10**30},
        {"top_k": 1 << 63},
        {"logit_bias": {1.5: 1}},
        {"logit_bias": [1]},
        {"logit_bias": {1: float("nan")}},
        {"max_tokens": 1.5},
        {"seed": -1},
        {"grammar": 5},
    ],
)
def test_settings_of_the_wrong_kind_are_refused(given: dict[str, Any]):
    with pytest.raises(InputError) as caught:
        Sampling(**given)
    assert len(str(caught.value)) < 300


def test_usual_settings_are_accepted():
    assert Sampling(stop="a").stop == ("a",)
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")
    assert Sampling(stop=None).stop == ()
    Sampling(temperature=2, presence_penalty=-2.0, logit_bias={5: float("-inf"), 6: -100})


def test_prompts_of_the_wrong_type_are_refused():
    model = auraflux.load(tiny(), device="cpu", context=64, sampling={"temperature": 0})
    for wrong in (b"abc", bytearray(b"a"), [1.7], [1, "2"], [True], 5, None, {"a": 1}, [[1]]):
        with pytest.raises(InputError, match="a prompt must be a string or a list of token ids, not "):
            model.generate(wrong)
    assert list(model.tokens(torch.tensor([5, 6]), max_tokens=2)) == list(model.tokens((5, 6), max_tokens=2))


@pytest.mark.parametrize(
    "given", [{"context": 1.5}, {"context": "64"}, {"chunk": 0}, {"max_sequences": 10**9}, {"context": True}]
)
def test_sizes_are_integers(given: dict[str, Any]):
    with pytest.raises(SettingsError, match="must be an integer from 1 to"):
        auraflux.load(tiny(), device="cpu", **given)


def test_negative_cache_settings():
    with pytest.raises(SettingsError, match="recent_window=-1 is negative"):
        CacheSettings("k8v4", recent_window=-1)


def test_running_out_of_memory_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("auraflux.loading.load.load_with", full)
    assert refused("generate", tiny(), "-p", "a") == "error: there is not enough memory.\n"
