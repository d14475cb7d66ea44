"""Skips tests marked `gpu` without a GPU, and then runs Triton kernels in the interpreter."""

import gc
import os
from collections import Counter
from collections.abc import Iterator

if "PYTEST_XDIST_WORKER" in os.environ:
    # workers share the cores, so waiting threads must not spin; read when OpenMP is loaded
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

# read when a kernel is first imported, so set before any test module is
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


# files of few, slow tests start first, so that no worker runs them alone at the end
LONG = ("test_cuda_compile.py",)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Exempt objects created at import from garbage collection: they live until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sizes = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name not in LONG, -sizes[item.path], item.path))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="torch finds no NVIDIA GPU"))
