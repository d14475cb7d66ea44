"""docs/tested.md is generated from docs/tested.json, and the pytest plugin records passing tests with an oracle."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from auraflux.models import FAMILIES
from tests import tested

SAMPLE_TESTS = """
from types import SimpleNamespace
import pytest, torch
from auraflux.weights.loader import Weights
from auraflux.weights.mismatches import Mismatches
from tests.tested import external_oracle

def load(family):
    checkpoint = SimpleNamespace(form="hf", experts=None, quantization={}, method=None, config={"model_type": family})
    weights = object.__new__(Weights)
    weights.checkpoint, weights.bits, weights.device = checkpoint, None, torch.device("cpu")
    weights._stored, weights._unloaded, weights._mismatches = {}, set(), Mismatches("sample")
    weights.check_loaded()

@external_oracle("somebody")
def expected_logits(): ...

@pytest.fixture(scope="module")
def loaded():
    load("fixture")

def test_compared(): load("compared"); expected_logits()
def test_not_compared(): load("not_compared")
def test_failing(): load("failing"); expected_logits(); assert False
def test_without_an_oracle(loaded): ...
def test_by_a_fixture(loaded): expected_logits()
"""


@pytest.mark.parametrize("workers", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_passing_tests_with_an_oracle_are_counted(workers: str, tmp_path: Path):
    (tmp_path / "test_sample.py").write_text(SAMPLE_TESTS)
    plugins = ["-p", "no:cacheprovider", "-p", "xdist", "-p", "tests.tested"]
    options = ["--tested", tmp_path / "found.json", "-n", workers, "--dist", "loadfile", "--rootdir", tmp_path]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *options, tmp_path]
    # installed pytest plugins take seconds to import, in each of two processes
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    made = subprocess.run(command, cwd=tested.ROOT, env=environment, capture_output=True, text=True)
    assert "1 failed, 4 passed" in made.stdout, made.stdout
    one = {"dense": {"cpu": ["somebody"]}}
    assert json.loads((tmp_path / "found.json").read_text()) == {"compared": one, "fixture": one}


def test_gpu_results_are_merged_and_cpu_results_replaced():
    stored = {"llama": {"dense": {"cpu": ["mlx-lm"], "cuda": ["transformers"]}, "FP8": {"cpu": ["transformers"]}}}
    found = {"llama": {"dense": {"cpu": ["transformers"]}}}
    assert tested.merge_results(stored, found, merge=False) == {
        "llama": {"dense": {"cpu": ["transformers"], "cuda": ["transformers"]}}
    }
    merged = {"cpu": ["mlx-lm", "transformers"], "cuda": ["transformers"]}
    assert tested.merge_results(stored, found, merge=True) == {"llama": {"dense": merged, "FP8": {"cpu": ["transformers"]}}}


def test_generated_page_is_current():
    found = json.loads(tested.RESULTS.read_text())
    assert tested.as_json(found) == tested.RESULTS.read_text()
    assert tested.page(found) == tested.PAGE.read_text(), "docs/tested.md is stale: make table"


def test_every_family_was_tested():
    assert set(FAMILIES) - set(json.loads(tested.RESULTS.read_text())) == set()
