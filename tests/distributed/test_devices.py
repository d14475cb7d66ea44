"""Devices of ranks, and their connection through NCCL or gloo."""

import pytest
import torch

from auraflux.distributed.comm.devices import Devices
from auraflux.distributed.parallel import parse_parallel
from auraflux.errors import SettingsError

HOSTS = "10.0.0.1,10.0.0.2"


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake a machine with four GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(
    ("layout", "hosts", "device", "found"),
    [
        ("tensor=2", None, "cpu", Devices("cpu", 1, False)),
        ("tensor=4", None, "cuda", Devices("cuda", 1, True)),
        ("experts=2", None, "cuda", Devices("cuda", 1, True)),
        ("pipeline=2,experts=2", None, "cuda", Devices("cuda", 1, True)),
        # hidden states between stages go through host memory
        ("pipeline=4", None, "cuda", Devices("cuda", 1, False)),
        # NCCL refuses two ranks on one GPU
        ("tensor=2", None, "cuda:1", Devices("cuda:1", 2, False)),
        # NCCL would choose a network by itself
        ("experts=2", HOSTS, "cuda", Devices("cuda:0", 1, False)),
        ("pipeline=2", HOSTS, "cuda:3", Devices("cuda:3", 1, False)),
    ],
)
def test_devices_of_layouts(layout: str, hosts: str | None, device: str, found: Devices):
    assert Devices.of(parse_parallel(layout, hosts), torch.device(device)) == found


@pytest.mark.usefixtures("four")
def test_each_rank_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch):
    assert [Devices("cuda", 1, True).device_of(rank) for rank in range(3)] == [torch.device("cuda", n) for n in range(3)]
    assert Devices("cuda:1", 2, False).device_of(5) == torch.device("cuda", 1)
    # torchrun numbers local ranks per machine
    for name, value in {"WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 4, "LOCAL_RANK": 3, "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))
    assert Devices("cuda", 1, True).device_of(7) == torch.device("cuda", 3)
    cuda = torch.device("cuda")
    # NCCL connects a stage only within one machine
    assert Devices.of(parse_parallel("pipeline=2,experts=4"), cuda).nccl
    assert not Devices.of(parse_parallel("experts=8"), cuda).nccl


@pytest.mark.usefixtures("four")
def test_unsupported_layouts_on_gpus_are_refused():
    with pytest.raises(SettingsError, match="tensor=8 needs 8 GPUs on this machine, which has 4"):
        Devices.of(parse_parallel("tensor=8"), torch.device("cuda"))
    with pytest.raises(SettingsError, match="context parallelism runs on CPUs only"):
        Devices.of(parse_parallel("pipeline=2,context=2"), torch.device("cuda"))
