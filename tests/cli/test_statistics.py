"""The line of statistics: why a generation ended, no rate where there was none, and figures after an interrupt."""

import json

import pytest
from click.testing import CliRunner, Result

import auraflux
from auraflux.cli import main
from auraflux.cli.generate import figures
from auraflux.scheduler.stats import Stats
from auraflux.tokenizer.tokenizer import MEDIA, Tokenizer
from auraflux.tokenizer.vocabulary.gguf import NORMAL
from tests.engine.tiny import tiny


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [*map(str, words), "--context", "64"])


def test_the_end_reason_is_shown():
    done = run("generate", tiny(), "-p", "The quick", "-n", 3)
    assert "generated 3 tokens, " in done.stderr
    assert "/s (token limit) · " in done.stderr
    stats = json.loads(run("generate", tiny(), "-p", "a", "-p", "b", "-n", 2, "--json").stdout)["stats"]
    assert stats["finish_reasons"] == ["length", "length"]


def test_one_token_has_no_rate():
    done = run("generate", tiny(), "-p", "The quick", "-n", 1)
    assert "generated 1 token (token limit) · " in done.stderr
    assert " 0.0/s" not in done.stderr


def test_end_reasons_of_a_batch_are_counted():
    stats = Stats(tokens=9, finish_reasons=("stop", "length", "stop", "stop_string"))
    assert "generated 9 tokens (2 end token, 1 token limit, 1 stop string)" in figures(stats, "none")


def test_an_interrupted_generation_has_statistics():
    model = auraflux.load(tiny(), device="cpu", context=64)
    stream = model.tokens("The quick", max_tokens=20, temperature=0)
    for _ in range(3):
        next(stream)
    stream.close()
    assert model.stats.finish_reasons == ("cancelled",)
    assert model.stats.prompt_tokens + model.stats.reused_tokens > 0
    assert model.stats.tokens >= 3
    assert model.stats.cache_nbytes > 0
    assert "(interrupted)" in figures(model.stats, "k4v4")


@pytest.mark.parametrize("words", [["--chat", "-p", ""], ["--chat", "-p", " \n"], ["--system", "x", "-p", ""], ["-p", ""]])
def test_an_empty_message_is_refused(words: list[str]):
    done = run("generate", tiny(), *words)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: the prompt is empty.")


def test_placeholders_of_images_are_not_text():
    pieces = [*"abc", *MEDIA, "ab"]
    made = Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": pieces,
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.token_type": [NORMAL] * len(pieces),
        }
    )
    assert made.decode([0, 3, 1]) == "ab"


def test_a_cache_beyond_the_free_memory_is_refused():
    with pytest.raises(auraflux.AurafluxError, match=r"cache_memory=1000\.00 GB is more than the .* of free memory"):
        auraflux.load(tiny(), device="cpu", context=64, cache_memory="1TB")
