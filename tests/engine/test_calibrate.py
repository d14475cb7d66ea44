"""Key calibration: a run measures what the formulas say, for every family, and lowers the quantization error."""

from typing import Any

import pytest
import torch

from auraflux.cache import AttentionShape, CacheSettings
from auraflux.engine import calibrate
from auraflux.engine.calibrate import AttentionBlock, ErrorWeights, RotaryPairs, calibrate_keys, random_tokens
from auraflux.engine.engine import Engine
from auraflux.engine.model_runner import ModelRunner
from auraflux.eval.metrics import compare
from tests.models.test_graphs import MODELS
from tests.scheduler.test_scheduler import model_of

CPU = {"dtype": torch.float32, "device": "cpu"}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [8, 4, 0])
def test_means_rotate_with_their_block(rotary: int, interleaved: bool):
    """Against complex numbers: the mean of k e^(-i theta t), and its mean over the angles of a block."""
    torch.manual_seed(0)
    k, positions = torch.randn(150, 2, 16), torch.arange(1, 151)
    theta = 0.4 ** torch.arange(1.0, 1 + rotary, dtype=torch.float64)
    found = RotaryPairs(theta, 16, interleaved).mean_of(k, positions)
    means = found.prepare(found.angles(192)).centres(torch.arange(192))
    rotated = k[..., : 2 * rotary].double()
    low, high = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    angles = positions[:, None, None] * theta
    mean = (torch.complex(low, high) * torch.exp(-1j * angles)).mean(0)
    for block in range(3):
        whole = (mean * torch.exp(1j * theta * torch.arange(64 * block, 64 * block + 64)[:, None, None])).mean(0)
        parts = (
            (torch.stack([whole.real, whole.imag], -1).flatten(-2)) if interleaved else torch.cat([whole.real, whole.imag], -1)
        )
        still = k[..., 2 * rotary :].double().mean(0)
        torch.testing.assert_close(means[64 * block + 7], torch.cat([parts, still], -1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [9, 6])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_scales_weigh_scores_by_the_effect_of_their_errors(
    sinks: bool, softcap: float | None, window: int, monkeypatch: pytest.MonkeyPatch
):
    """The weight of a score is the squared derivative of the layer's output, found by autograd."""
    torch.manual_seed(1)
    monkeypatch.setattr(calibrate, "MIN_DISTANCE", 3)
    count, heads, width = 9, 2, 8
    q, k, v, out = torch.randn(count, heads, width), *torch.randn(2, count, width), torch.randn(20, heads, width)
    logits = torch.tensor([0.5, -1.0]) if sinks else None
    seen = torch.ones(count, count).tril().triu(1 - window).bool()
    error_weights = ErrorWeights(v, torch.einsum("rhd,rhe->hde", out, out))
    # the queries of two blocks
    for rows, keys in ((slice(0, 7), range(7)), (slice(7, 9), range(max(0, 8 - window), 9))):
        scores = AttentionBlock(q[rows], k.T, keys, window, 0.3, softcap, logits)
        error_weights.add(scores, scores.weighted_sum(v))

    def result(shift: torch.Tensor) -> torch.Tensor:
        scores = q.transpose(0, 1) @ k.T * 0.3 + shift
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if logits is not None:
            scores = torch.cat([scores, logits[:, None, None].expand(-1, count, 1)], -1)
        return torch.einsum("hts,sd,rhd->htr", scores.softmax(-1)[..., :count], v, out)

    change: Any = torch.autograd.functional.jacobian(result, torch.zeros(heads, count, count))
    expected = torch.stack([torch.stack([change[h, t, :, h, t].square().sum(0) for t in range(count)]) for h in range(heads)])
    distances = torch.arange(count)[:, None] - torch.arange(count)
    expected = expected * ((distances >= 3) & (torch.arange(count) > 0))
    torch.testing.assert_close(error_weights.key_weights.float(), expected.sum((0, 1)), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(error_weights.query_weights, expected.sum(2).T, rtol=1e-3, atol=1e-5)

    pairs = RotaryPairs(torch.tensor([0.5, 0.1]).double(), width, False)
    scales = pairs.scales(k, q, error_weights.key_weights, error_weights.query_weights)
    moments = [torch.einsum("hts,sd->d", expected, k.square()), torch.einsum("hts,thd->d", expected, q.square())]
    joined = [torch.cat([(m[:2] + m[2:4]) / 2] * 2 + [m[4:]]) for m in moments]
    by_hand = ((joined[0] + 1e-4 * joined[0].mean()) / (joined[1] + 1e-4 * joined[1].mean())) ** 0.1875
    torch.testing.assert_close(scales / scales[0], by_hand / by_hand[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_recorded_run_is_the_uncompressed_one(name: str, monkeypatch: pytest.MonkeyPatch):
    model, shapes, text = model_of(name)
    hidden = []
    forward = ModelRunner.forward
    monkeypatch.setattr(ModelRunner, "forward", lambda *given: [hidden.append(forward(*given)), hidden[-1]][1])
    key_calibration = calibrate_keys(model, shapes, text[:90], **CPU)
    numbers = [number for number, shape in enumerate(shapes) if type(shape) is AttentionShape]
    assert list(key_calibration.layers) == numbers
    engine = Engine(model, shapes, CacheSettings("none"), context=90, exact=True)
    plain = engine.step(engine.cache.batch([engine.cache.open()]), [text[:90]])
    if numbers:
        torch.testing.assert_close(hidden[0], plain, rtol=1e-3, atol=1e-4)
    for number in numbers:
        key_calibration.for_layer(number, shapes[number].heads, shapes[number].width)
    assert key_calibration.digest == calibrate_keys(model, shapes, text[:90], **CPU).digest


def test_calibration_lowers_the_error_of_keys_with_a_mean(monkeypatch: pytest.MonkeyPatch):
    """Keys with a large bias, as Qwen2.5's, in channels of low RoPE frequency: the mean is most of them."""
    model, shapes, text = model_of("llama")
    chance = torch.Generator().manual_seed(3)
    half = shapes[0].width // 2
    for layer in model.layers:
        bias = 4 * torch.randn(layer.mixer.qkv[1].shape[0], generator=chance)
        bias[torch.arange(len(bias)) % half < half // 2] = 0
        monkeypatch.setattr(layer.mixer, "qkv_bias", [None, bias, None])
    key_calibration = calibrate_keys(model, shapes, random_tokens(128, model.config.vocab), **CPU)
    divergences = {}
    for name, found in (("off", None), ("means", key_calibration.means_only()), ("all", key_calibration)):
        scores = []
        for kv in ("none", "k3v8"):
            options = {"context": 200, "exact": True, "key_calibration": None if kv == "none" else found}
            engine = Engine(model, shapes, CacheSettings(kv, sink_tokens=None if kv == "none" else 1), **options)
            scores.append(engine.all_logits(engine.cache.open(), text[:200]))
        targets = torch.tensor(text[1:201])
        divergences[name] = sum(compare(scores[0], scores[1], targets).kl)
    assert divergences["means"] < divergences["off"] / 2
    assert divergences["all"] < divergences["off"] / 2


def test_random_tokens_repeat_and_exclude_special_tokens():
    assert random_tokens(64, 50) == random_tokens(64, 50)
    assert set(random_tokens(500, 50, excluded=[3, 4, 99])) <= set(range(50)) - {3, 4}
    assert calibrate.DEFAULT_TOKENS > calibrate.FEW_TOKENS
