"""The short form of fuzzing: the first inputs of every target, and that the harness sees what it should."""

import mmap
import sys
import time
from pathlib import Path

import pytest

from auraflux.errors import InputError
from auraflux.models import FAMILIES
from auraflux.quant.gguf_blocks import LAYOUTS
from auraflux.weights.methods import METHODS
from tests.fuzz import corpus
from tests.fuzz.board import Board, table, total
from tests.fuzz.harness import Share, Target, attempt, turns
from tests.fuzz.request_targets import BODIES, client
from tests.fuzz.targets import TARGETS
from tests.weights.quantized_folders import FOLDERS


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_inputs_are_taken_or_refused_in_a_sentence(target: Target):
    # other tests run beside this one
    found = [attempt(target, number, patience=10) for number in range(target.short)]
    assert [(tried.number, tried.what) for tried in found if tried.what is not None] == []


def test_every_field_of_a_request_is_tried():
    for route in client().app.routes:
        if (takes := getattr(route, "takes", None)) is not None:
            assert set(takes.model_fields) <= set(BODIES[route.path]), route.path
            takes.model_validate(BODIES[route.path])


def test_every_family_method_and_block_type_is_tried():
    assert {FAMILIES[kind] for kind in corpus.MODELS} == set(FAMILIES.values())
    assert {FOLDERS[kind][0]["quant_method"] for kinds in corpus.METHODS.values() for kind in kinds} == set(METHODS)
    assert {f"gguf-{kind.lower()}" for kind in LAYOUTS} <= {target.name for target in TARGETS}


def raising(err: BaseException):
    def attempt(rng):
        raise err

    return attempt


def test_the_harness_sees_what_is_wrong():
    assert attempt(Target("fine", lambda rng: None), 0).what is None
    refused = attempt(Target("refused", raising(InputError("no."))), 0)
    assert refused.refused
    assert refused.what is None
    for err, what in (
        (KeyError("x"), "KeyError"),
        (InputError("a\nb\nc\nd"), "its error has"),
        (InputError(""), "its error has"),
    ):
        found = attempt(Target("wrong", raising(err)), 7)
        assert (found.target, found.number) == ("wrong", 7)
        assert str(found.what).startswith(what)
    found = attempt(Target("slow", lambda rng: time.sleep(60), limit_s=0.05), 0)
    assert "more than 0.05 seconds" in str(found.what)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux forgets the peak of a process's memory")
def test_memory_of_an_input_is_its_own():
    def touch(rng):
        # from the system, whatever the process has to spare
        with mmap.mmap(-1, 40 << 20) as room:
            room.write(bytes(40 << 20))

    large = Target("large", touch, memory=20 << 20)
    for number in (1, 2):
        assert "MiB of memory" in str(attempt(large, number).what)
    assert attempt(Target("small", lambda rng: len(b"x" * (1 << 20)), memory=20 << 20), 3).what is None


def test_shares_of_processes_are_all_numbers_once():
    often, seldom = Target("often", print), Target("seldom", print, every=3)
    tried = [
        (target.name, number)
        for at in range(2)
        for target, number in turns([often, seldom], Share(first=10 + at, step=2, inputs=8))
    ]
    assert sorted(number for name, number in tried if name == "often") == list(range(10, 22))
    assert sorted(number for name, number in tried if name == "seldom") == [10, 11, 16, 17]
    assert len(list(turns([often, seldom], Share(each=5)))) == 10


def test_figures_outlive_their_process(tmp_path: Path):
    targets = [Target("fine", lambda rng: None), Target("wrong", raising(KeyError("x")))]
    board = Board(tmp_path / "board", targets)
    for target in targets:
        board.begin(target, 4)
        board.end(attempt(target, 4))
    board.begin(targets[0], 5)
    again = Board(tmp_path / "board", targets)
    assert again.broken_off() == ("fine", 5)
    assert again.broken_off() is None
    assert (total([again], "inputs"), total([again], "findings")) == (3, 2)
    assert [line.split()[:4] for line in table([again]).splitlines()[1:]] == [["fine", "2", "0", "1"], ["wrong", "1", "0", "1"]]


def test_an_input_is_made_of_its_number():
    made: list[float] = []
    target = Target("numbers", lambda rng: made.append(rng.random()))
    for number in (1, 2, 1):
        attempt(target, number)
    assert made[0] == made[2] != made[1]
