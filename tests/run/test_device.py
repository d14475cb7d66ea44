"""What is made ready of a device beforehand."""

import torch

from auraflux.ops._dispatch import all_ops
from auraflux.run.device import fetch_kernels


def test_kernels_are_imported_beside_other_things():
    thread = fetch_kernels(torch.device("cuda"))
    assert thread is not None
    thread.join()
    assert all("cuda" in op._kernels for op in all_ops())


def test_a_cpu_has_no_kernels_to_be_imported():
    assert fetch_kernels(torch.device("cpu")) is None
