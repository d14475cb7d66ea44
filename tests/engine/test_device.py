"""Background import of GPU kernels."""

import torch

from auraflux.engine.device import preload_kernels
from auraflux.ops._dispatch import all_ops


def test_kernels_are_imported_in_the_background():
    thread = preload_kernels(torch.device("cuda"))
    assert thread is not None
    thread.join()
    assert all("cuda" in op._kernels for op in all_ops())


def test_a_cpu_imports_no_gpu_kernels():
    assert preload_kernels(torch.device("cpu")) is None
