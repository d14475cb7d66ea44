"""The pages that say what was tested are those of docs/tested.json, and the recorder counts what it should."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from auraflux.models import FAMILIES
from tests import tested

STORY = """
from types import SimpleNamespace
import pytest, torch
from auraflux.weights.loader import Weights
from tests.tested import outside

def load(family):
    checkpoint = SimpleNamespace(form="hf", experts=None, quantization={}, method=None, config={"model_type": family})
    weights = object.__new__(Weights)
    weights.checkpoint, weights.bits, weights.device = checkpoint, None, torch.device("cpu")
    weights._stored, weights._left, weights._missing, weights._wrong = {}, set(), [], []
    weights.done()

@outside("somebody")
def truth(): ...

@pytest.fixture(scope="module")
def loaded():
    load("kept")

def test_held(): load("held"); truth()
def test_alone(): load("alone")
def test_failing(): load("failing"); truth(); assert False
def test_without_an_oracle(loaded): ...
def test_by_a_fixture(loaded): truth()
"""


@pytest.mark.parametrize("workers", ["2", pytest.param("0", marks=pytest.mark.slow)])
def test_tests_that_pass_and_heard_an_oracle_count(workers: str, tmp_path: Path):
    (tmp_path / "test_story.py").write_text(STORY)
    plugins = ["-p", "no:cacheprovider", "-p", "xdist", "-p", "tests.tested"]
    options = ["--tested", tmp_path / "found.json", "-n", workers, "--dist", "loadfile", "--rootdir", tmp_path]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *options, tmp_path]
    # plugins of packages that are installed take seconds to import, in each of three processes
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    made = subprocess.run(command, cwd=tested.ROOT, env=environment, capture_output=True, text=True)
    assert "1 failed, 4 passed" in made.stdout, made.stdout
    one = {"dense": {"cpu": ["somebody"]}}
    assert json.loads((tmp_path / "found.json").read_text()) == {"held": one, "kept": one}


def test_what_was_found_on_a_gpu_is_added_and_what_was_found_here_replaces():
    kept = {"llama": {"dense": {"cpu": ["mlx-lm"], "cuda": ["transformers"]}, "FP8": {"cpu": ["transformers"]}}}
    found = {"llama": {"dense": {"cpu": ["transformers"]}}}
    assert tested.joined(kept, found, merge=False) == {"llama": {"dense": {"cpu": ["transformers"], "cuda": ["transformers"]}}}
    whole = {"cpu": ["mlx-lm", "transformers"], "cuda": ["transformers"]}
    assert tested.joined(kept, found, merge=True) == {"llama": {"dense": whole, "FP8": {"cpu": ["transformers"]}}}


def test_the_pages_say_what_was_found():
    found = json.loads(tested.KEPT.read_text())
    assert tested.as_json(found) == tested.KEPT.read_text()
    assert tested.page(found) == tested.PAGE.read_text(), "docs/tested.md is not what docs/tested.json says: make table"
    readme = tested.README.read_text()
    assert tested.with_table(readme, found) == readme, "the README's table is not what docs/tested.json says: make table"


def test_every_family_was_tested():
    assert set(FAMILIES) - set(json.loads(tested.KEPT.read_text())) == set()
