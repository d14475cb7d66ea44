"""`auraflux diff`: bit-identical runs, and the token and layer where two configurations diverge."""

import json

import pytest
from click.testing import CliRunner, Result

from auraflux.cli import main
from tests.engine.tiny import tiny

KEEP = "--context 64 --device cpu --calibrate off"
TEXT = "the cat sat on the mat and the cat saw the hat"


def run(a: str, b: str, *words: str) -> Result:
    ways = ["--a", f"{KEEP} {a}", "--b", f"{KEEP} {b}"]
    return CliRunner().invoke(main, ["diff", str(tiny()), *ways, "-p", TEXT, *words])


def test_equal_configurations_do_not_diverge():
    found = run("--kv none", "--kv none")
    assert found.exit_code == 0
    assert found.stdout.startswith("all logits are bit-identical")


def test_fewer_bits_diverge_in_the_first_layer():
    found = json.loads(run("--kv none", "--kv k2v2 --sink-tokens 0 --recent-window 0", "--json").stdout)
    # the first token attends only to itself, whose value is quantized too
    assert (found["token"], found["layer"]) == (0, 0)
    assert 0 < found["kl_mean"] <= found["kl_most"]
    errors = [layer["error"] for layer in found["layers"]]
    assert len(errors) == 2
    assert 0 < errors[0] < errors[1]


def test_the_table_lists_layers():
    shown = run("--kv none", "--kv k2v2 --sink-tokens 0 --recent-window 0 --prefill-chunk 3").stdout
    assert "diverges at token 0 of" in shown
    assert "KL mean" in shown


@pytest.mark.parametrize(
    ("words", "sentence"),
    [("--nothing", "No such option"), ("--kv 'k4", "cannot be split"), ("--speculate ngram", "Use --prefill-chunk N")],
)
def test_an_invalid_configuration_is_refused(words: str, sentence: str):
    found = run("--kv none", words)
    assert found.exit_code == 1
    assert sentence in found.stderr
