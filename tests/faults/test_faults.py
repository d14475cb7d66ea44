"""Injected I/O errors, failed allocations and kills leave the old or the new state, and the next run succeeds."""

import os
import subprocess
import sys

import pytest

from tests.faults.calls import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def run(*args: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.faults", *args]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_sampled_faults_leave_the_old_or_the_new_state():
    run("--fault", "full", "--fault", "killed", "--stride", "199")


@pytest.mark.slow
def test_every_fault_leaves_the_old_or_the_new_state():
    run()
