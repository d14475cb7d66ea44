"""Tests marked `gpu` are skipped, and say why, where torch finds no GPU; there Triton's kernels run in its interpreter."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # workers share the cores: whoever waits there must not spin. Read when the first library with threads is loaded
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

# read when a kernel is first imported, so before any test module is
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="torch finds no NVIDIA GPU"))
