"""Quantization in chunks gives the bits of quantization at once, on all cores and on a GPU."""

import pytest
import torch

from auraflux.quant import QTensor, quantize
from auraflux.weights.convert import quantize_large as module
from auraflux.weights.convert.quantize_large import quantize_large

DEVICES = [None, "cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def parts(found: QTensor) -> list[torch.Tensor]:
    assert found.biases is not None
    return [part.cpu() for part in (found.packed, found.scales, found.biases)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 32), (3, 128)])
def test_chunks_equal_the_whole(monkeypatch: pytest.MonkeyPatch, bits: int, group: int, dtype: torch.dtype, device: str | None):
    monkeypatch.setattr(module, "CHUNK", 256 * 3)
    monkeypatch.setattr(module, "GPU_CHUNK", 256 * 5)
    torch.manual_seed(0)
    weight = torch.randn(2, 19, 256).to(dtype)
    # groups of zeros, of one value and of one sign
    weight[0, 0], weight[0, 1], weight[1, 2] = 0, 0.5, weight[1, 2].abs()
    found = quantize_large(weight, bits, group, None if device is None else torch.device(device))
    assert found.shape == (2, 19, 256)
    assert found.packed.device.type == (device or "cpu")
    for mine, wanted in zip(parts(found), parts(quantize(weight, bits, group)), strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_small_weight_is_one_chunk(device: str):
    weight = torch.randn(3, 128)
    found = quantize_large(weight, 4, 64, torch.device(device))
    assert found.packed.device.type == device
    assert torch.equal(found.packed.cpu(), quantize(weight, 4, 64).packed)
