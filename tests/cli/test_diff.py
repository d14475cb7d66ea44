"""`auraflux diff`: nothing where nothing differs, and where two ways part the token and layer."""

import json

import pytest
from click.testing import CliRunner, Result

from auraflux.cli import main
from tests.run.tiny import tiny

KEEP = "--context 64 --device cpu --calibrate off"
TEXT = "the cat sat on the mat and the cat saw the hat"


def run(a: str, b: str, *words: str) -> Result:
    ways = ["--a", f"{KEEP} {a}", "--b", f"{KEEP} {b}"]
    return CliRunner().invoke(main, ["diff", str(tiny()), *ways, "-p", TEXT, *words])


def test_the_same_way_twice_does_not_part():
    found = run("--kv none", "--kv none")
    assert found.exit_code == 0
    assert found.stdout.startswith("no bit of any score differs")


def test_a_coarser_cache_parts_in_the_first_layer():
    found = json.loads(run("--kv none", "--kv k2v2 --first 0 --newest 0", "--json").stdout)
    # the first token sees only its own value, which is coded as well
    assert (found["token"], found["layer"]) == (0, 0)
    assert 0 < found["kl_mean"] <= found["kl_most"]
    errors = [layer["error"] for layer in found["layers"]]
    assert len(errors) == 2
    assert 0 < errors[0] < errors[1]


def test_the_table_names_layers():
    shown = run("--kv none", "--kv k2v2 --first 0 --newest 0 --piece 3").stdout
    assert "parts at token 0 of" in shown
    assert "KL mean" in shown


@pytest.mark.parametrize(
    ("words", "sentence"),
    [("--nothing", "No such option"), ("--kv 'k4", "cannot be split"), ("--speculate ngram", "Use --piece N")],
)
def test_what_is_no_way_is_refused(words: str, sentence: str):
    found = run("--kv none", words)
    assert found.exit_code == 1
    assert sentence in found.stderr
