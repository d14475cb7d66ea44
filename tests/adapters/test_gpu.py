"""Adapters on a GPU: logits of the CPU, mixed batches, and recorded steps."""

from pathlib import Path
from typing import Any

import pytest
import torch

import auraflux
from auraflux.bench.arguments import moved
from auraflux.ops import LinearInput, add_lora, linear, lora_gate_up, lora_linears, rms_norm
from auraflux.ops._gpu_inputs import codes
from auraflux.ops.lora.cases import adapted, gated, products
from tests.adapters.test_adapters import ATTENTION, EXPERTS, PROMPT, adapt, generated, llama, qwen3_moe, run_together
from tests.adapters.test_adapters import load as load_on_cpu
from tests.models.oracles import error, save

pytestmark = pytest.mark.gpu
KINDS: list[tuple[Any, dict[str, Any]]] = [
    (llama, {}),
    (llama, {"r": 16}),
    (qwen3_moe, {"target_modules": [*ATTENTION, "gate"], "target_parameters": EXPERTS}),
]


def load(folder: Path, adapters: dict[str, Path], **options: Any) -> auraflux.LanguageModel:
    return auraflux.load(folder, "cuda", kv="none", calibrate="off", context=256, adapters=adapters, **options)


@pytest.mark.parametrize(("make", "config"), KINDS, ids=["llama", "rank-16", "experts"])
def test_logits_are_those_of_the_cpu(make: Any, config: dict[str, Any], tmp_path: Path):
    model = make()
    save(model, tmp_path / "model")
    adapt(model, tmp_path / "one", **config)
    adapters = {"one": tmp_path / "one"}
    on_gpu, on_cpu = load(tmp_path / "model", adapters), load_on_cpu(tmp_path / "model", adapters)
    for name in ("one", None):
        assert error(on_gpu.logits(PROMPT, name).float().cpu(), on_cpu.logits(PROMPT, name)) < 0.03


@pytest.mark.parametrize("make", [llama, qwen3_moe])
def test_sequences_of_a_mixed_batch_follow_their_own_adapters(make: Any, tmp_path: Path):
    """Each token is the best one by the logits of its adapter on the CPU, or nearly: products of a batch round otherwise."""
    model = make()
    save(model, tmp_path / "model")
    for number in range(3):
        adapt(model, tmp_path / f"a{number}", number, target_modules=ATTENTION, r=4 * number + 4)
    names: list[str | None] = ["a0", "a1", "a2", None]
    adapters = {name: tmp_path / name for name in names if name}
    on_gpu, on_cpu = load(tmp_path / "model", adapters, max_sequences=4), load_on_cpu(tmp_path / "model", adapters)
    found = run_together(on_gpu, names)
    assert len(set(map(tuple, found))) == len(names)
    for name, tokens in zip(names, found, strict=True):
        logits = on_cpu.logits(PROMPT + tokens, name)[len(PROMPT) - 1 : -1]
        behind = logits.amax(1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert float((behind / logits.std(1)).max()) < 0.1


@pytest.mark.parametrize("tokens", [1, 8])
def test_inputs_may_be_read_before_the_products_are_complete(tokens: int):
    """In a graph, where a kernel begins before the previous one has ended."""
    w = moved(codes(4096, 4096, bits=4), "cuda")
    args = moved(adapted(tokens, 4096, (4096,), dtype=torch.bfloat16, one=True), "cuda")
    x, norm = args["inputs"].x, torch.ones(4096, device="cuda")

    def chain(overlap: bool) -> list[torch.Tensor]:
        found, h = [], rms_norm(x, norm, 1e-5)
        for _ in range(8):
            found.append(linear(h, w))
            add_lora(LinearInput(h), found[-1:], args["adapters"], overlap)
            h = rms_norm(found[-1], norm, 1e-5)
        return found

    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = chain(True)
    for _ in range(20):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert all(torch.equal(y, want) for y, want in zip(outs, chain(False), strict=True))


@pytest.mark.parametrize("tokens", [1, 8])
def test_replayed_products_are_equal(tokens: int):
    """Programs that wait for others in one launch: in a graph, again and again."""
    shapes = {"norm": True, "delta": True, "bits": 4, "dtype": torch.bfloat16}
    qkv = moved(products(tokens, 4096, (4096, 1024, 1024), **shapes), "cuda")
    mlp = moved(gated(tokens, 4096, 14336, **shapes), "cuda")

    def both() -> list[torch.Tensor]:
        total, found = lora_linears(**qkv)
        return [total, *found, *lora_gate_up(**mlp)]

    wanted, graph = both(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [both() for _ in range(3)]
    for _ in range(100):
        graph.replay()
        assert all(torch.equal(y, want) for found in outs for y, want in zip(found, wanted, strict=True))


def test_steps_with_adapters_are_replayed(tmp_path: Path):
    model = llama()
    save(model, tmp_path / "model")
    adapt(model, tmp_path / "one")
    adapters = {"one": tmp_path / "one"}
    mine = load(tmp_path / "model", adapters)
    replayed = generated(mine, "one")
    assert mine.engine.graphs.refused is None
    assert any(key[3] and step.recording for key, step in mine.engine.graphs._steps.items())
    assert replayed == generated(load(tmp_path / "model", adapters, graphs=False), "one")
