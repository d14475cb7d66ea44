"""Lost ranks: running sequences fail with an error, and the group restarts on request."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from auraflux.distributed.comm.group import PendingReceive, open_rendezvous
from auraflux.distributed.follower import follow
from auraflux.distributed.parallel import LOCAL, Parallel, address_of, parse_parallel
from auraflux.errors import InputError, RankError, SettingsError
from auraflux.loading.language_model import LanguageModel
from auraflux.loading.load import load
from tests.distributed.test_pipeline import OPTIONS, saved
from tests.distributed.threaded_ranks import free_port, parallel_here, threaded_ranks
from tests.engine.tiny import tiny

TIMEOUT_S = 2.0
LONG_S = 20.0  # so that the closed connection of a killed rank is noticed before its heartbeat
PROMPT = list(range(5, 30))


@contextmanager
def processes(size: int = 2, timeout_s: float = TIMEOUT_S) -> Iterator[LanguageModel]:
    """Load a model whose followers are processes."""
    model = load(tiny(), calibrate="off", context=256, parallel=Parallel("pipeline", size, timeout_s=timeout_s))
    try:
        yield model
    finally:
        model.engine.ranks.close()


def generated(model: LanguageModel) -> list[int]:
    return list(model.tokens(PROMPT, max_tokens=12, temperature=0, ignore_eos=True))


def fails(model: LanguageModel, number: int, why: str = "rank") -> None:
    """Signal a follower in the middle of a generation, which must end with the error `why`."""
    follower = model.engine.ranks.launcher.processes[-1].pid
    stream = model.tokens(PROMPT, max_tokens=200, temperature=0, ignore_eos=True)
    for _ in range(5):
        next(stream)
    os.kill(follower, number)
    with pytest.raises(RankError, match=why):
        list(stream)


def restarted(model: LanguageModel) -> list[int]:
    model.scheduler.fail_all(RankError("lost."))
    model.engine.restart(lambda: False)
    return generated(model)


def test_a_killed_rank_is_noticed_at_once_and_restarts():
    with processes(timeout_s=LONG_S) as model:
        before = generated(model)
        fails(model, signal.SIGKILL, "a rank is lost: its connection was closed")
        with pytest.raises(RankError):
            generated(model)
        assert restarted(model) == before


@pytest.mark.slow
def test_a_stopped_rank_is_lost_after_the_timeout():
    with processes() as model:
        before = generated(model)
        fails(model, signal.SIGSTOP, "rank 1 has not answered for 2 s")
        assert restarted(model) == before


@pytest.mark.slow
def test_an_idle_group_notices_a_lost_rank():
    with processes() as model:
        os.kill(model.engine.ranks.launcher.processes[0].pid, signal.SIGSTOP)
        time.sleep(2 * TIMEOUT_S)
        with pytest.raises(RankError, match="rank 1 has not answered"):
            model.engine.check()


def test_another_model_is_refused(tmp_path: Path):
    for file in tiny().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    refused: list[Exception] = []

    def other(host: str, port: int, path: Any) -> None:
        try:
            follow(host, port, tmp_path)
        except InputError as err:
            refused.append(err)

    said = r"rank 1 cannot join: its model.safetensors differs from rank 0's"
    with pytest.raises(InputError, match=said), threaded_ranks(tiny(), "pipeline=2", run_follower=other):
        pass
    assert "differs from rank 0's" in str(refused[0])


@pytest.mark.parametrize("text", ["pipeline", "pipeline=1", "pipeline=x", "sideways=2", "=2", "pipeline=99999"])
def test_invalid_layouts(text: str):
    with pytest.raises(SettingsError):
        parse_parallel(text)


def test_one_host_per_rank():
    with pytest.raises(SettingsError, match="needs 2 hosts, one per rank"):
        parse_parallel("pipeline=2", "10.0.0.1")
    assert parse_parallel("pipeline=2", "10.0.0.1:5, 10.0.0.2").rendezvous == ("10.0.0.1", 5)
    assert parse_parallel("pipeline=2").rendezvous == (LOCAL, 0)


@pytest.mark.parametrize("text", ["", "10.0.0.1:x", ":5", "10.0.0.1:70000"])
def test_invalid_addresses(text: str):
    with pytest.raises(SettingsError):
        address_of(text)


def test_the_rendezvous_listens_at_one_address_only():
    endpoint, server = open_rendezvous(LOCAL, 0)
    hexadecimal = f"{endpoint.port:04X}"
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"]
    assert [entry for entry in listening if entry.endswith(f":{hexadecimal}")] == [f"0100007F:{hexadecimal}"]
    del server


def test_no_rendezvous():
    with pytest.raises(RankError, match="no answer at"):
        follow(LOCAL, free_port(), tiny())


def test_too_many_ranks_for_the_layers():
    with pytest.raises(SettingsError, match="cannot be split into 3 pipeline stages"), threaded_ranks(tiny(), "pipeline=3"):
        pass


def test_an_interrupted_step_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch):
    with threaded_ranks(tiny(), "pipeline=2", calibrate="off", context=256) as model:
        before = generated(model)

        wait = PendingReceive.wait

        def interrupt(expected: PendingReceive) -> Tensor:
            if expected._group.rank > 0:
                return wait(expected)
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(PendingReceive, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.logits(PROMPT)
        model.reset()
        assert generated(model) == before


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe"])
def test_a_step_interrupted_before_the_next_stage_leaves_nothing_behind(name: str):
    path, ids = saved(name)
    with threaded_ranks(path, "pipeline=2", calibrate="off", **OPTIONS) as model:
        before = model.logits(ids[:40])
        text = list(model.tokens(ids[:9], max_tokens=6, temperature=0, ignore_eos=True))
        stage, steps = model.engine.runner.stage, iter(range(5))
        forward_stage = stage.forward_stage

        def interrupt(*args: Any) -> Tensor:
            if next(steps) == 2:
                raise KeyboardInterrupt
            return forward_stage(*args)

        # the next stage waits for the hidden states of the announced step
        stage.forward_stage = interrupt
        with pytest.raises(KeyboardInterrupt):
            model.logits(ids[:60])
        stage.forward_stage = forward_stage
        assert torch.equal(model.logits(ids[:40]), before)
        assert list(model.tokens(ids[:9], max_tokens=6, temperature=0, ignore_eos=True)) == text


@pytest.mark.slow
def test_a_rank_of_another_machine_rejoins():
    port = free_port()
    command = [sys.executable, "-m", "auraflux", "follow", f"{LOCAL}:{port}", str(tiny()), "--restart", "--rank-timeout", "2"]
    with subprocess.Popen(["sh", "-c", f"sleep 2; exec {shlex.join(command)}"]) as other:
        try:
            hosts = parallel_here("pipeline=2", port, timeout_s=TIMEOUT_S, restart=True)
            model = load(tiny(), calibrate="off", context=256, parallel=hosts)
            before = generated(model)
            other.send_signal(signal.SIGSTOP)
            with pytest.raises(RankError, match="rank 1 has not answered"):
                list(model.tokens(PROMPT, max_tokens=200, temperature=0, ignore_eos=True))
            other.send_signal(signal.SIGCONT)
            assert restarted(model) == before
            model.engine.ranks.close()
            assert other.wait(60) == 0
        finally:
            other.kill()
