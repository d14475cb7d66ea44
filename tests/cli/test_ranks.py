"""Commands with a model on several ranks."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from auraflux.cli import main
from tests.distributed.threaded_ranks import free_port
from tests.engine.tiny import tiny

ROOT = Path(__file__).parents[2]
REQUEST = ["-p", "hello there", "-n", "12", "-t", "0", "--calibrate", "off", "--context", "128", "--device", "cpu"]


def run(*words: str, code: int = 0) -> str:
    """Run a command; return its stdout, or its stderr if it fails."""
    made = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert made.returncode == code, made.stderr
    assert "Traceback" not in made.stderr or code
    return made.stderr if code else made.stdout


@pytest.mark.slow
def test_local_ranks_and_torchrun_match_one_process():
    alone = run("auraflux", "generate", str(tiny()), *REQUEST)
    assert alone.strip()
    assert run("auraflux", "generate", str(tiny()), *REQUEST, "--parallel", "pipeline=2") == alone
    launcher = "torch.distributed.run", "--nproc-per-node", "2", "-m", "auraflux"
    assert run(*launcher, "generate", str(tiny()), *REQUEST, "--parallel", "pipeline=2") == alone


@pytest.mark.slow
def test_torchrun_starts_combined_parallelism():
    model = str(tiny(mixture=True))
    alone = run("auraflux", "generate", model, *REQUEST)
    assert alone.strip()
    launcher = "torch.distributed.run", "--nproc-per-node", "4", "-m", "auraflux"
    assert run(*launcher, "generate", model, *REQUEST, "--parallel", "pipeline=2,experts=2") == alone
    said = run("torch.distributed.run", "--nproc-per-node", "2", "-m", "auraflux", "generate", model, *REQUEST,
               "--parallel", "pipeline=2,experts=2", code=1)  # fmt: skip
    assert "error: torchrun started 2 processes, but --parallel needs 4." in said


@pytest.mark.slow
def test_errors_are_one_sentence():
    said = run("auraflux", "generate", str(tiny()), *REQUEST, "--parallel", "pipeline=9", code=1)
    assert said.strip().splitlines()[-1] == "error: a model of 2 layers cannot be split into 9 pipeline stages."
    assert "Traceback" not in said
    said = run("auraflux", "follow", "127.0.0.1:1", str(tiny()), code=1)
    assert said.startswith("error: no answer at 127.0.0.1:1")


def test_a_plan_shows_memory_and_bottleneck():
    words = ["plan", str(tiny()), "--hosts", "1GB,2GB/1GB", "--memory-bandwidth", "10GB", "--json"]
    planned = json.loads(CliRunner().invoke(main, words, catch_exceptions=False).stdout)
    assert planned["measured"] == []
    found = planned["ways"]
    assert [row["way"] for row in found] == ["one machine", "pipeline=2", "tensor=2"]
    assert sum(found[1]["parts"]) == found[0]["parts"][0]
    assert found[1]["bound"] == "network"
    assert found[0]["tokens_per_s"] > found[1]["tokens_per_s"]
    long = json.loads(CliRunner().invoke(main, [*words, "--context", "100000"], catch_exceptions=False).stdout)["ways"]
    assert [row["way"] for row in long] == ["one machine", "pipeline=2", "context=2", "tensor=2"]
    assert long[0]["tokens_per_s"] < found[0]["tokens_per_s"]
    refused = CliRunner().invoke(main, ["plan", str(tiny()), "--hosts", "some"])
    assert refused.exit_code == 1
    assert "not a size" in refused.output
    refused = CliRunner().invoke(main, ["plan", str(tiny()), "--hosts", "1GB", "--memory-bandwidth", "0"])
    assert refused.exit_code == 1
    assert "--memory-bandwidth '0' must be above 0" in refused.output
    refused = CliRunner().invoke(main, ["plan", str(tiny()), "--hosts", "127.0.0.1,1GB"])
    assert refused.exit_code == 1
    assert "'1GB' is no address, as others of --hosts are" in refused.output


@pytest.mark.slow
def test_a_plan_measures_machines_and_releases_them():
    port, model = free_port(), str(tiny())
    words = ["auraflux", "plan", model, "--hosts", f"127.0.0.1:{port},127.0.0.1"]
    with following(port, model) as follower:
        shown = run(*words)
        assert follower.wait(60) == 0
    lines = shown.splitlines()
    assert [line.split()[1] for line in lines if "127.0.0.1" in line] == ["127.0.0.1"] * 2
    assert next(n for n, line in enumerate(lines) if "free memory" in line) < next(
        n for n, line in enumerate(lines) if "pipeline=2" in line
    )
    with following(port, model) as follower:
        found = json.loads(run(*words, "--json"))
        assert follower.wait(60) == 0
    first, second = found["measured"]
    assert first["link_latency_s"] is None
    latency, rate = second["link_latency_s"], second["link_nbytes_per_s"]
    row = next(row for row in found["ways"] if row["way"] == "pipeline=2")
    # two transfers of a row of 64 numbers
    assert row["seconds"]["network"] == pytest.approx(2 * (latency + 256 / rate))
    assert {row["way"] for row in found["ways"]} == {"one machine", "pipeline=2", "tensor=2"}


@contextmanager
def following(port: int, model: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a follower that joins rank 0."""
    again = f"import socket, time\nwhile socket.socket().connect_ex(('127.0.0.1', {port})): time.sleep(0.1)\n"
    code = f"{again}from auraflux.cli import main\nmain(['follow', '127.0.0.1:{port}', {model!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
