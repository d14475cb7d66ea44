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


# files of few, slow tests, and how many usual ones take as long: the longest start first, so that no worker runs them alone at
# the end
SLOW_FILES = {
    "test_cuda_compile.py": 4000,
    "test_capture.py": 3000,
    "test_faults.py": 3000,
    "test_ahead.py": 2000,
    **dict.fromkeys(("test_failure.py", "test_serving.py", "test_process.py", "test_file_watch.py", "test_wheel.py"), 80),
    **dict.fromkeys(("test_pack.py", "test_pack_faults.py", "test_examples.py", "test_jit_cache.py", "test_tested.py"), 80),
    **dict.fromkeys(
        ("test_expert_memory.py", "test_model_pool.py", "test_gpu_pool.py", "test_disk_tier.py", "test_ring.py"), 60
    ),
    **dict.fromkeys(("test_soak.py", "test_structure.py", "test_prebuilt.py", "test_cpu_worker.py", "test_bench_serve.py"), 60),
}
YOUNG_OBJECTS = 10_000  # between two garbage collections; compiling kernels makes millions


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Exempt objects created at import from garbage collection: they live until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sizes = Counter(item.path for item in items)
    items.sort(key=lambda item: (-max(sizes[item.path], SLOW_FILES.get(item.path.name, 0)), item.path))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="torch finds no NVIDIA GPU"))
