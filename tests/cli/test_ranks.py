"""Commands whose model is divided among ranks, as users start them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from auraflux.cli import main
from tests.run.ranks.together import free_port
from tests.run.tiny import tiny

ROOT = Path(__file__).parents[2]
ASKED = ["-p", "hello there", "-n", "12", "-t", "0", "--calibrate", "off", "--context", "128", "--device", "cpu"]


def run(*words: str, code: int = 0) -> str:
    """What a command writes to stdout, or to stderr where it fails."""
    made = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert made.returncode == code, made.stderr
    assert "Traceback" not in made.stderr or code
    return made.stderr if code else made.stdout


@pytest.mark.slow
def test_processes_of_this_machine_and_those_of_torchrun_write_what_one_does():
    alone = run("auraflux", "generate", str(tiny()), *ASKED)
    assert alone.strip()
    assert run("auraflux", "generate", str(tiny()), *ASKED, "--parallel", "pipeline=2") == alone
    launcher = "torch.distributed.run", "--nproc-per-node", "2", "-m", "auraflux"
    assert run(*launcher, "generate", str(tiny()), *ASKED, "--parallel", "pipeline=2") == alone


@pytest.mark.slow
def test_ways_that_are_combined_are_started_by_torchrun():
    model = str(tiny(mixture=True))
    alone = run("auraflux", "generate", model, *ASKED)
    assert alone.strip()
    launcher = "torch.distributed.run", "--nproc-per-node", "4", "-m", "auraflux"
    assert run(*launcher, "generate", model, *ASKED, "--parallel", "pipeline=2,experts=2") == alone
    said = run("torch.distributed.run", "--nproc-per-node", "2", "-m", "auraflux", "generate", model, *ASKED,
               "--parallel", "pipeline=2,experts=2", code=1)  # fmt: skip
    assert "error: torchrun started 2 processes, and --parallel asks for 4." in said


@pytest.mark.slow
def test_what_cannot_be_is_one_sentence():
    said = run("auraflux", "generate", str(tiny()), *ASKED, "--parallel", "pipeline=9", code=1)
    assert said.strip().splitlines()[-1] == "error: a model of 2 layers cannot be divided among 9 ranks."
    assert "Traceback" not in said
    said = run("auraflux", "follow", "127.0.0.1:1", str(tiny()), code=1)
    assert said.startswith("error: nobody answers at 127.0.0.1:1")


def test_a_plan_says_what_fits_and_what_bounds_it():
    words = ["plan", str(tiny()), "--hosts", "1GB,2GB/1GB", "--memory-speed", "10GB", "--json"]
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
    refused = CliRunner().invoke(main, ["plan", str(tiny()), "--hosts", "1GB", "--memory-speed", "0"])
    assert refused.exit_code == 1
    assert "--memory-speed '0' is none" in refused.output
    refused = CliRunner().invoke(main, ["plan", str(tiny()), "--hosts", "127.0.0.1,1GB"])
    assert refused.exit_code == 1
    assert "'1GB' is no address, as others of --hosts are" in refused.output


@pytest.mark.slow
def test_machines_that_are_there_are_measured_and_let_go():
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
    # two crossings of a row of 64 numbers
    assert row["seconds"]["network"] == pytest.approx(2 * (latency + 256 / rate))
    assert {row["way"] for row in found["ways"]} == {"one machine", "pipeline=2", "tensor=2"}


@contextmanager
def following(port: int, model: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A machine that follows as soon as somebody leads."""
    again = f"import socket, time\nwhile socket.socket().connect_ex(('127.0.0.1', {port})): time.sleep(0.1)\n"
    code = f"{again}from auraflux.cli import main\nmain(['follow', '127.0.0.1:{port}', {model!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
