"""A short fuzzing run: the first inputs of every target; and tests of the harness itself."""

import mmap
import sys
import time
from pathlib import Path

import pytest

from auraflux.errors import InputError
from auraflux.models import FAMILIES
from auraflux.quant.gguf_layouts import LAYOUTS
from auraflux.weights.formats.methods import METHODS
from tests.fuzz import corpus
from tests.fuzz.counters import Counters, table, total
from tests.fuzz.harness import Share, Target, attempt, inputs_of
from tests.fuzz.request_targets import BODIES, client
from tests.fuzz.targets import TARGETS
from tests.weights.formats.quantized_folders import FOLDERS


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_inputs_are_accepted_or_refused_with_a_short_error(target: Target):
    # other tests run at the same time
    found = [attempt(target, number, patience=10) for number in range(target.short)]
    assert [(attempted.number, attempted.what) for attempted in found if attempted.what is not None] == []


def test_every_request_field_is_fuzzed():
    for route in client().app.routes:
        if (takes := getattr(route, "request", None)) is not None and route.path != "/api/delete":
            assert set(takes.model_fields) <= set(BODIES[route.path]), route.path
            takes.model_validate(BODIES[route.path])


def test_every_family_method_and_block_type_is_fuzzed():
    assert {FAMILIES[kind] for kind in corpus.MODELS} == set(FAMILIES.values())
    assert {FOLDERS[kind][0]["quant_method"] for kinds in corpus.METHODS.values() for kind in kinds} == set(METHODS)
    assert {f"gguf-{kind.lower()}" for kind in LAYOUTS} <= {target.name for target in TARGETS}


def raising(err: BaseException):
    def attempt(rng):
        raise err

    return attempt


def test_harness_reports_errors_and_hangs():
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux can reset a process's peak memory")
def test_memory_is_measured_per_input():
    def touch(rng):
        # fresh pages, independent of the allocator's free memory
        with mmap.mmap(-1, 40 << 20) as room:
            room.write(bytes(40 << 20))

    large = Target("large", touch, memory=20 << 20)
    for number in (1, 2):
        assert "MiB of memory" in str(attempt(large, number).what)
    assert attempt(Target("small", lambda rng: len(b"x" * (1 << 20)), memory=20 << 20), 3).what is None


def test_shares_cover_every_number_once():
    often, seldom = Target("often", print), Target("seldom", print, every=3)
    attempted = [
        (target.name, number)
        for at in range(2)
        for target, number in inputs_of([often, seldom], Share(first=10 + at, step=2, inputs=8))
    ]
    assert sorted(number for name, number in attempted if name == "often") == list(range(10, 22))
    assert sorted(number for name, number in attempted if name == "seldom") == [10, 11, 16, 17]
    assert len(list(inputs_of([often, seldom], Share(each=5)))) == 10


def test_counters_survive_a_crash(tmp_path: Path):
    targets = [Target("fine", lambda rng: None), Target("wrong", raising(KeyError("x")))]
    counters = Counters(tmp_path / "counters", targets)
    for target in targets:
        counters.begin(target, 4)
        counters.end(attempt(target, 4))
    counters.begin(targets[0], 5)
    again = Counters(tmp_path / "counters", targets)
    assert again.interrupted_input() == ("fine", 5)
    assert again.interrupted_input() is None
    assert (total([again], "inputs"), total([again], "findings")) == (3, 2)
    assert [line.split()[:4] for line in table([again]).splitlines()[1:]] == [["fine", "2", "0", "1"], ["wrong", "1", "0", "1"]]


def test_inputs_are_reproducible():
    made: list[float] = []
    target = Target("numbers", lambda rng: made.append(rng.random()))
    for number in (1, 2, 1):
        attempt(target, number)
    assert made[0] == made[2] != made[1]
