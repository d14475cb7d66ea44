"""Which device each rank has, and through what ranks reach each other."""

import pytest
import torch

from auraflux.errors import SettingsError
from auraflux.run.ranks.devices import Devices
from auraflux.run.ranks.parallel import parse_parallel

HOSTS = "10.0.0.1,10.0.0.2"


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(
    ("way", "hosts", "device", "found"),
    [
        ("tensor=2", None, "cpu", Devices("cpu", 1, False)),
        ("tensor=4", None, "cuda", Devices("cuda", 1, True)),
        ("experts=2", None, "cuda", Devices("cuda", 1, True)),
        ("pipeline=2,experts=2", None, "cuda", Devices("cuda", 1, True)),
        # rows from stage to stage go through main memory
        ("pipeline=4", None, "cuda", Devices("cuda", 1, False)),
        # NCCL does not serve two ranks of one GPU
        ("tensor=2", None, "cuda:1", Devices("cuda:1", 2, False)),
        # nor would it keep to the network that was named
        ("experts=2", HOSTS, "cuda", Devices("cuda:0", 1, False)),
        ("pipeline=2", HOSTS, "cuda:3", Devices("cuda:3", 1, False)),
    ],
)
def test_what_ranks_have(way: str, hosts: str | None, device: str, found: Devices):
    assert Devices.of(parse_parallel(way, hosts), torch.device(device)) == found


@pytest.mark.usefixtures("four")
def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch):
    assert [Devices("cuda", 1, True).own(rank) for rank in range(3)] == [torch.device("cuda", n) for n in range(3)]
    assert Devices("cuda:1", 2, False).own(5) == torch.device("cuda", 1)
    # torchrun counts those of a machine by themselves
    for name, value in {"WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 4, "LOCAL_RANK": 3, "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))
    assert Devices("cuda", 1, True).own(7) == torch.device("cuda", 3)
    cuda = torch.device("cuda")
    # stages that are on one machine each can use NCCL, those that are not cannot
    assert Devices.of(parse_parallel("pipeline=2,experts=4"), cuda).nccl
    assert not Devices.of(parse_parallel("experts=8"), cuda).nccl


@pytest.mark.usefixtures("four")
def test_what_gpus_cannot_do_is_refused():
    with pytest.raises(SettingsError, match="tensor=8 wants 8 GPUs of this machine, and there are 4"):
        Devices.of(parse_parallel("tensor=8"), torch.device("cuda"))
    with pytest.raises(SettingsError, match="pages are dealt out to ranks on CPUs only"):
        Devices.of(parse_parallel("pipeline=2,context=2"), torch.device("cuda"))
