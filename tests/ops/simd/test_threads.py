"""Every job of a launch runs exactly once, for any number of threads and launches."""

import ctypes
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from auraflux.ops.simd.atomics import fetch_add, load, pause, store
from auraflux.ops.simd.jit import Kernel, arguments, int64s, share
from auraflux.ops.simd.replay.record import record
from auraflux.ops.simd.threads import WAKE_AFTER, set_threads, thread_pool, threads


@Kernel
def count(args, job, jobs):
    runs_at, visits_at, n = arguments(args, 3)
    int64s(runs_at, jobs)[job] += 1
    visits = int64s(visits_at, n)
    for i in share(n, job, jobs):
        visits[i] += 1


def launched(launches: int, jobs: int, n: int = 1000, pause_s: float = 0.0) -> bool:
    """Return whether every job ran once in each launch."""
    runs, visits = torch.zeros(jobs, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)
    for number in range(launches):
        count(jobs, runs.data_ptr(), visits.data_ptr(), n)
        # results are visible when the launch returns
        if visits[-1] != number + 1:
            return False
        time.sleep(pause_s)
    return bool((runs == launches).all() and (visits == launches).all())


@pytest.fixture(autouse=True)
def _started():
    before = threads()
    yield
    set_threads(before)


@pytest.mark.parametrize("jobs", [1, 2, 3, 17, 1000])
def test_every_job_runs_once(jobs: int):
    assert launched(500, jobs)


def test_more_jobs_than_a_ticket_holds_run_on_one_thread():
    assert launched(2, 1 << 16, n=10)


def test_sleeping_threads_are_woken():
    assert launched(20, threads(), n=100_000, pause_s=0.005)


@Kernel
def overlap(args, job, jobs):
    """Write the most jobs that ran at a time."""
    running, most, spins = arguments(args, 3)
    now = fetch_add(running, 1) + 1
    if now > load(most):
        store(most, now)
    for _ in range(spins):
        pause()
    fetch_add(running, -1)


def test_a_long_launch_wakes_threads_in_spite_of_the_back_off():
    if threads() < 2:
        pytest.skip("there is one thread")
    counts = torch.zeros(2, dtype=torch.int64)
    overlap(1, counts.data_ptr(), counts.data_ptr() + 8, 1)
    # all workers sleep, and none may be woken for an hour
    time.sleep(0.2)
    back_off = ctypes.c_int64.from_address(thread_pool.shared + WAKE_AFTER)
    before, back_off.value = back_off.value, time.monotonic_ns() + 3600 * 10**9
    try:
        overlap(16, counts.data_ptr(), counts.data_ptr() + 8, 1_000_000)
    finally:
        back_off.value = before
    assert counts.tolist()[1] > 1


def test_launches_of_several_threads_do_not_mix():
    results: list[bool] = []
    callers = [threading.Thread(target=lambda: results.append(launched(2000, 4))) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == [True] * 3


def test_the_number_of_jobs_can_be_set():
    set_threads(5)
    assert threads() == 5
    assert launched(100, threads())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_starts_its_threads():
    child = os.fork()
    if child == 0:
        fresh = not thread_pool.count
        os._exit(0 if fresh and threads() and launched(500, 4) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_replayed_launches_share_their_jobs():
    runs, visits = torch.zeros(4, dtype=torch.int64), torch.zeros(1000, dtype=torch.int64)
    with record() as recording:
        for _ in range(50):
            count(4, runs.data_ptr(), visits.data_ptr(), 1000)
    for _ in range(20):
        recording.replay()
    assert (visits == 50 * 21).all()
    assert (runs == 50 * 21).all()


CODE = "from tests.ops.simd.test_threads import launched; assert launched(1000, 4)"


def test_a_process_exits_while_its_threads_spin():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
