"""The number of cores that kernels use: physical cores of this process, within the CPU quota of its control groups."""

import os
from pathlib import Path

import pytest

from auraflux.machine import compute_cores


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a system of four cores with two hardware threads each, all of which this process may use."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for cpu in range(8):
        write(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}")
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{text}\n")


def allow(monkeypatch: pytest.MonkeyPatch, *cpus: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cpus))


def test_hardware_threads_of_a_core_count_once(root: Path):
    assert compute_cores(root) == 4


@pytest.mark.parametrize(("cpus", "cores"), [([0, 1], 2), ([0, 4], 1), ([3, 5, 7], 2), ([6], 1)])
def test_only_cores_of_the_affinity_mask_count(root: Path, monkeypatch: pytest.MonkeyPatch, cpus: list[int], cores: int):
    allow(monkeypatch, *cpus)
    assert compute_cores(root) == cores


def test_each_cpu_is_a_core_where_the_system_lists_no_siblings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    allow(monkeypatch, 0, 1, 2)
    assert compute_cores(tmp_path) == 3


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 4), ("800000 100000", 4), ("300000 100000", 3), ("150000 100000", 2), ("20000 100000", 1), ("", 4)],
)
def test_a_quota_bounds_the_cores(root: Path, quota: str, cores: int):
    write(root, "proc/self/cgroup", "0::/job")
    write(root, "sys/fs/cgroup/job/cpu.max", quota)
    assert compute_cores(root) == cores


def test_the_least_quota_of_all_parents_counts(root: Path):
    write(root, "proc/self/cgroup", "0::/pod/job")
    write(root, "sys/fs/cgroup/cpu.max", "300000 100000")
    write(root, "sys/fs/cgroup/pod/cpu.max", "100000 50000")
    write(root, "sys/fs/cgroup/pod/job/cpu.max", "max 100000")
    assert compute_cores(root) == 2


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize("folder", ["", "docker/4f1d"])
def test_a_quota_of_version_1(root: Path, mount: str, folder: str):
    # a container may see its group at the root although its path is that of the host
    write(root, "proc/self/cgroup", "4:memory:/docker/4f1d\n3:cpu,cpuacct:/docker/4f1d\n0::/")
    write(root, f"sys/fs/cgroup/{mount}/{folder}/cpu.cfs_quota_us", "250000")
    write(root, f"sys/fs/cgroup/{mount}/{folder}/cpu.cfs_period_us", "100000")
    assert compute_cores(root) == 3


def test_version_1_without_a_quota(root: Path):
    write(root, "proc/self/cgroup", "1:cpu:/")
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    assert compute_cores(root) == 4


def test_this_machine():
    assert 1 <= compute_cores() <= (os.cpu_count() or 1)
