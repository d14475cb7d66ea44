"""Disks that are full, torn or taken away, memory that ends, and kills: the old state or the new one, and then on as before."""

import os
import subprocess
import sys

import pytest

from tests.faults.calls import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def run(*words: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.faults", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_some_calls_of_everything_that_writes():
    run("--fault", "full", "--fault", "killed", "--stride", "89")


@pytest.mark.slow
def test_every_call_of_everything_that_writes():
    run()
