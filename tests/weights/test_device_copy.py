"""Copies in chunks through reused buffers have the bits of the source, also when it changes afterwards."""

from typing import Any

import pytest
import torch

from auraflux.weights.device_copy import Staging, copy_to_device, staging_memory

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float32, torch.int32, torch.uint8, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (63, 100), (3, 17, 32), (1024,)])
def test_chunks_are_the_source(dtype: torch.dtype, shape: tuple[int, ...]):
    staging = Staging(CPU, 256, 2)
    sources = [torch.randint(0, 100, shape).to(dtype) for _ in range(5)]
    for source in sources:
        found = staging.copy(source)
        assert (found.dtype, found.shape) == (dtype, source.shape)
        assert torch.equal(found.view(torch.uint8), source.view(torch.uint8))


def test_an_error_of_a_thread_reaches_the_caller_and_the_buffers_stay_usable():
    staging, source = Staging(CPU, 64, 2), torch.arange(256, dtype=torch.uint8)
    with pytest.raises(TypeError, match="meta"):
        staging.copy(source.to("meta"))
    for _ in range(8):
        assert torch.equal(staging.copy(source), source)


def test_buffers_are_pageable_where_the_system_refuses_to_pin(monkeypatch: pytest.MonkeyPatch):
    empty = torch.empty

    def refuse(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    assert staging_memory(64, torch.device("cuda")).shape == (64,)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_gpu_gets_large_small_and_transposed_tensors(dtype: torch.dtype | None):
    gpu = torch.device("cuda")
    for source in (torch.randn(5000, 1001), torch.randn(7, 3), torch.randn(2000, 1001).T, torch.randn(6000, 512).half()):
        wanted = source.to(gpu, dtype)
        found = copy_to_device(source, gpu, dtype)
        source.zero_()
        assert found.dtype is wanted.dtype
        assert torch.equal(found, wanted)
