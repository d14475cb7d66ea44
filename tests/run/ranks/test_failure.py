"""Ranks that are killed or stopped end what they held with an error, in the time that was stated, and come back when asked."""

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

from auraflux.errors import InputError, RankError, SettingsError
from auraflux.run.language import LanguageModel
from auraflux.run.load import load
from auraflux.run.ranks.follow import follow
from auraflux.run.ranks.group import Expected, meeting_place
from auraflux.run.ranks.parallel import LOCAL, Parallel, address_of, parse_parallel
from tests.run.ranks.test_pipeline import OPTIONS, saved
from tests.run.ranks.together import free_port, parallel_here, together
from tests.run.tiny import tiny

TIMEOUT_S = 2.0
SLACK_S = 10.0  # of a machine that is busy
PROMPT = list(range(5, 30))


@contextmanager
def processes(size: int = 2) -> Iterator[LanguageModel]:
    """A model whose other ranks are processes of their own."""
    model = load(tiny(), calibrate="off", context=256, parallel=Parallel("pipeline", size, timeout_s=TIMEOUT_S))
    try:
        yield model
    finally:
        model.engine.ranks.close()


def written(model: LanguageModel) -> list[int]:
    return list(model.tokens(PROMPT, max_tokens=12, temperature=0, endless=True))


def fails(model: LanguageModel, number: int) -> float:
    """Signal a follower in the middle of a text; how long it takes until that ends."""
    follower = model.engine.ranks._started[-1].pid
    writing = model.tokens(PROMPT, max_tokens=200, temperature=0, endless=True)
    for _ in range(5):
        next(writing)
    os.kill(follower, number)
    began = time.monotonic()
    with pytest.raises(RankError, match="rank"):
        list(writing)
    return time.monotonic() - began


def comes_back(model: LanguageModel) -> list[int]:
    model.scheduler.lose(RankError("lost."))
    model.engine.restart(lambda: False)
    return written(model)


def test_a_killed_rank_is_noticed_at_once_and_comes_back():
    with processes() as model:
        before = written(model)
        assert fails(model, signal.SIGKILL) < SLACK_S
        with pytest.raises(RankError):
            written(model)
        assert comes_back(model) == before


@pytest.mark.slow
def test_a_stopped_rank_is_given_up_in_time():
    with processes() as model:
        before = written(model)
        took = fails(model, signal.SIGSTOP)
        assert TIMEOUT_S * 0.5 < took < TIMEOUT_S + SLACK_S
        assert comes_back(model) == before


@pytest.mark.slow
def test_an_idle_group_notices_too():
    with processes() as model:
        os.kill(model.engine.ranks._started[0].pid, signal.SIGSTOP)
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

    said = r"rank 1 cannot take part: its model.safetensors is another than rank 0's"
    with pytest.raises(InputError, match=said), together(tiny(), "pipeline=2", take_part=other):
        pass
    assert "is another than rank 0's" in str(refused[0])


@pytest.mark.parametrize("text", ["pipeline", "pipeline=1", "pipeline=x", "sideways=2", "=2", "pipeline=99999"])
def test_what_cannot_be_asked_for(text: str):
    with pytest.raises(SettingsError):
        parse_parallel(text)


def test_hosts_are_as_many_as_ranks():
    with pytest.raises(SettingsError, match="wants as many hosts"):
        parse_parallel("pipeline=2", "10.0.0.1")
    assert parse_parallel("pipeline=2", "10.0.0.1:5, 10.0.0.2").meeting == ("10.0.0.1", 5)
    assert parse_parallel("pipeline=2").meeting == (LOCAL, 0)


@pytest.mark.parametrize("text", ["", "10.0.0.1:x", ":5", "10.0.0.1:70000"])
def test_addresses_that_are_none(text: str):
    with pytest.raises(SettingsError):
        address_of(text)


def test_ranks_meet_at_one_address_only():
    place, server = meeting_place(LOCAL, 0)
    hexadecimal = f"{place.port:04X}"
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"]
    assert [entry for entry in listening if entry.endswith(f":{hexadecimal}")] == [f"0100007F:{hexadecimal}"]
    del server


def test_nobody_answers():
    with pytest.raises(RankError, match="nobody answers"):
        follow(LOCAL, free_port(), tiny())


def test_too_many_ranks_for_the_layers():
    with pytest.raises(SettingsError, match="cannot be divided among 3 ranks"), together(tiny(), "pipeline=3"):
        pass


def test_an_interrupted_step_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch):
    with together(tiny(), "pipeline=2", calibrate="off", context=256) as model:
        before = written(model)

        wait = Expected.wait

        def interrupt(expected: Expected) -> Tensor:
            if expected._group.rank > 0:
                return wait(expected)
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(Expected, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.logits(PROMPT)
        model.reset()
        assert written(model) == before


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe"])
def test_a_step_that_is_interrupted_before_it_is_passed_on_leaves_nothing_behind(name: str):
    path, ids = saved(name)
    with together(path, "pipeline=2", calibrate="off", **OPTIONS) as model:
        before = model.logits(ids[:40])
        text = list(model.tokens(ids[:9], max_tokens=6, temperature=0, endless=True))
        layers, steps = model.engine.runner.part, iter(range(5))
        part = layers.part

        def interrupt(*given: Any) -> Tensor:
            if next(steps) == 2:
                raise KeyboardInterrupt
            return part(*given)

        # the next stage was told of the step, and waits for its rows
        layers.part = interrupt
        with pytest.raises(KeyboardInterrupt):
            model.logits(ids[:60])
        layers.part = part
        assert torch.equal(model.logits(ids[:40]), before)
        assert list(model.tokens(ids[:9], max_tokens=6, temperature=0, endless=True)) == text


@pytest.mark.slow
def test_a_rank_of_another_machine_joins_again():
    port = free_port()
    command = [sys.executable, "-m", "auraflux", "follow", f"{LOCAL}:{port}", str(tiny()), "--restart", "--rank-timeout", "2"]
    with subprocess.Popen(["sh", "-c", f"sleep 2; exec {shlex.join(command)}"]) as other:
        try:
            hosts = parallel_here("pipeline=2", port, timeout_s=TIMEOUT_S, restart=True)
            model = load(tiny(), calibrate="off", context=256, parallel=hosts)
            before = written(model)
            other.send_signal(signal.SIGSTOP)
            with pytest.raises(RankError, match="rank 1 has not answered"):
                list(model.tokens(PROMPT, max_tokens=200, temperature=0, endless=True))
            other.send_signal(signal.SIGCONT)
            assert comes_back(model) == before
            model.engine.ranks.close()
            assert other.wait(60) == 0
        finally:
            other.kill()
