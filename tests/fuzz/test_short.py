"""The short form of fuzzing: the first inputs of every target, and that the harness sees what it should."""

import time

import pytest

from auraflux.errors import InputError
from tests.fuzz.file_targets import TARGETS as FILES
from tests.fuzz.harness import Target, attempt
from tests.fuzz.op_targets import TARGETS as OPS
from tests.fuzz.request_targets import TARGETS as REQUESTS


@pytest.mark.parametrize("target", [*FILES, *REQUESTS, *OPS], ids=lambda target: target.name)
def test_inputs_are_taken_or_refused_in_a_sentence(target: Target):
    # other tests run beside this one
    found = [attempt(target, number, patience=10) for number in range(target.short)]
    assert [finding for finding in found if finding is not None] == []


def raising(err: BaseException):
    def attempt(rng):
        raise err

    return attempt


def test_the_harness_sees_what_is_wrong():
    assert attempt(Target("fine", lambda rng: None), 0) is None
    assert attempt(Target("refused", raising(InputError("no."))), 0) is None
    for err, what in (
        (KeyError("x"), "KeyError"),
        (InputError("a\nb\nc\nd"), "its error has"),
        (InputError(""), "its error has"),
    ):
        found = attempt(Target("wrong", raising(err)), 7)
        assert found is not None
        assert (found.target, found.number) == ("wrong", 7)
        assert found.what.startswith(what)
    found = attempt(Target("slow", lambda rng: time.sleep(60), limit_s=0.05), 0)
    assert found is not None
    assert "more than 0.05 seconds" in found.what


def test_an_input_is_made_of_its_number():
    made: list[float] = []
    target = Target("numbers", lambda rng: made.append(rng.random()))
    for number in (1, 2, 1):
        attempt(target, number)
    assert made[0] == made[2] != made[1]
