"""Vectors of keys: what a run finds is what the formulas say, for every family, and codes that use them are nearer."""

from typing import Any

import pytest
import torch

from auraflux.cache import AttentionShape, CacheSettings
from auraflux.eval.metrics import compare
from auraflux.run import calibrate
from auraflux.run.calibrate import Pairs, Scores, Worth, find_vectors, random_tokens
from auraflux.run.engine import Engine
from auraflux.run.runner import Runner
from tests.models.test_replay import MODELS
from tests.run.test_scheduler import model_of

CPU = {"dtype": torch.float32, "device": "cpu"}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turning", [8, 4, 0])
def test_centres_are_means_that_turn_with_their_block(turning: int, interleaved: bool):
    """Against complex numbers: the mean of k e^(-i theta t), and its mean over the angles of a block."""
    torch.manual_seed(0)
    k, positions = torch.randn(150, 2, 16), torch.arange(1, 151)
    theta = 0.4 ** torch.arange(1.0, 1 + turning, dtype=torch.float64)
    found = Pairs(theta, 16, interleaved).centred(k, positions)
    centres = found.made_ready(found.angles(192)).centres(torch.arange(192))
    rotated = k[..., : 2 * turning].double()
    low, high = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    angles = positions[:, None, None] * theta
    mean = (torch.complex(low, high) * torch.exp(-1j * angles)).mean(0)
    for block in range(3):
        whole = (mean * torch.exp(1j * theta * torch.arange(64 * block, 64 * block + 64)[:, None, None])).mean(0)
        parts = (
            (torch.stack([whole.real, whole.imag], -1).flatten(-2)) if interleaved else torch.cat([whole.real, whole.imag], -1)
        )
        still = k[..., 2 * turning :].double().mean(0)
        torch.testing.assert_close(centres[64 * block + 7], torch.cat([parts, still], -1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [9, 6])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_scales_weigh_scores_by_what_their_errors_do(
    sinks: bool, softcap: float | None, window: int, monkeypatch: pytest.MonkeyPatch
):
    """The weight of a score is the square of what the layer's result changes by when it does, found by autograd."""
    torch.manual_seed(1)
    monkeypatch.setattr(calibrate, "NEAR", 3)
    count, heads, width = 9, 2, 8
    q, k, v, out = torch.randn(count, heads, width), *torch.randn(2, count, width), torch.randn(20, heads, width)
    logits = torch.tensor([0.5, -1.0]) if sinks else None
    seen = torch.ones(count, count).tril().triu(1 - window).bool()
    worth = Worth(v, torch.einsum("rhd,rhe->hde", out, out))
    # the queries of two blocks
    for rows, keys in ((slice(0, 7), range(7)), (slice(7, 9), range(max(0, 8 - window), 9))):
        scores = Scores(q[rows], k.T, keys, window, 0.3, softcap, logits)
        worth.add(scores, scores.summed(v))

    def result(shift: torch.Tensor) -> torch.Tensor:
        scores = q.transpose(0, 1) @ k.T * 0.3 + shift
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if logits is not None:
            scores = torch.cat([scores, logits[:, None, None].expand(-1, count, 1)], -1)
        return torch.einsum("hts,sd,rhd->htr", scores.softmax(-1)[..., :count], v, out)

    change: Any = torch.autograd.functional.jacobian(result, torch.zeros(heads, count, count))
    expected = torch.stack([torch.stack([change[h, t, :, h, t].square().sum(0) for t in range(count)]) for h in range(heads)])
    back = torch.arange(count)[:, None] - torch.arange(count)
    expected = expected * ((back >= 3) & (torch.arange(count) > 0))
    torch.testing.assert_close(worth.of_keys.float(), expected.sum((0, 1)), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(worth.of_queries, expected.sum(2).T, rtol=1e-3, atol=1e-5)

    pairs = Pairs(torch.tensor([0.5, 0.1]).double(), width, False)
    scales = pairs.scales(k, q, worth.of_keys, worth.of_queries)
    moments = [torch.einsum("hts,sd->d", expected, k.square()), torch.einsum("hts,thd->d", expected, q.square())]
    joined = [torch.cat([(m[:2] + m[2:4]) / 2] * 2 + [m[4:]]) for m in moments]
    by_hand = ((joined[0] + 1e-4 * joined[0].mean()) / (joined[1] + 1e-4 * joined[1].mean())) ** 0.1875
    torch.testing.assert_close(scales / scales[0], by_hand / by_hand[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_recorded_run_is_the_uncompressed_one(name: str, monkeypatch: pytest.MonkeyPatch):
    model, shapes, text = model_of(name)
    hidden = []
    forward = Runner.forward
    monkeypatch.setattr(Runner, "forward", lambda *given: [hidden.append(forward(*given)), hidden[-1]][1])
    vectors = find_vectors(model, shapes, text[:90], **CPU)
    numbers = [number for number, shape in enumerate(shapes) if type(shape) is AttentionShape]
    assert list(vectors.layers) == numbers
    engine = Engine(model, shapes, CacheSettings("none"), context=90, exact=True)
    plain = engine.step(engine.cache.batch([engine.cache.open()]), [text[:90]])
    if numbers:
        torch.testing.assert_close(hidden[0], plain, rtol=1e-3, atol=1e-4)
    for number in numbers:
        vectors.of(number, shapes[number].heads, shapes[number].width)
    assert vectors.digest == find_vectors(model, shapes, text[:90], **CPU).digest


def test_keys_that_turn_around_a_mean_are_coded_nearer(monkeypatch: pytest.MonkeyPatch):
    """Keys with a large bias, as Qwen2.5's, in channels that turn slowly: what codes leave out is most of them."""
    model, shapes, text = model_of("llama")
    chance = torch.Generator().manual_seed(3)
    half = shapes[0].width // 2
    for layer in model.layers:
        bias = 4 * torch.randn(layer.mixer.qkv[1].shape[0], generator=chance)
        bias[torch.arange(len(bias)) % half < half // 2] = 0
        monkeypatch.setattr(layer.mixer, "qkv_bias", [None, bias, None])
    vectors = find_vectors(model, shapes, random_tokens(128, model.config.vocab), **CPU)
    divergences = {}
    for name, found in (("off", None), ("centres", vectors.centres_only()), ("all", vectors)):
        scores = []
        for kv in ("none", "k3v8"):
            options = {"context": 200, "exact": True, "vectors": None if kv == "none" else found}
            engine = Engine(model, shapes, CacheSettings(kv, first=None if kv == "none" else 1), **options)
            scores.append(engine.all_scores(engine.cache.open(), text[:200]))
        targets = torch.tensor(text[1:201])
        divergences[name] = sum(compare(scores[0], scores[1], targets).kl)
    assert divergences["centres"] < divergences["off"] / 2
    assert divergences["all"] < divergences["off"] / 2


def test_tokens_are_the_same_every_time_and_none_is_left_out_one():
    assert random_tokens(64, 50) == random_tokens(64, 50)
    assert set(random_tokens(500, 50, left_out=[3, 4, 99])) <= set(range(50)) - {3, 4}
    assert calibrate.TOKENS > calibrate.FEW
