"""LoRA adapters against PEFT, alone and in mixed batches."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import auraflux
from auraflux.cli import main
from auraflux.errors import FormatError, InputError, SettingsError
from tests.models.oracles import error, save, tokens, transformers_logits

SMALL: dict[str, Any] = {"vocab_size": 259, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
COUNT = 70  # tokens, past a page


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=100))


def qwen3_moe() -> Any:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 36, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, intermediate_size=100, **experts))


def gemma3() -> Any:
    windows = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}
    return Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, intermediate_size=100, **windows))


def adapt(model: Any, folder: Path, seed: int = 0, **config: Any) -> Tensor:
    """Train nothing: save a random adapter of a model, and return PEFT's logits with it; the model is as before."""
    # takes seconds, which other workers save
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    settings = {"target_modules": ATTENTION + MLP, "r": 5, "lora_alpha": 7, **config}
    adapted = get_peft_model(model, LoraConfig(init_lora_weights=False, lora_dropout=0.0, **settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    adapted.save_pretrained(folder)
    found = transformers_logits(adapted, tokens(model, COUNT))
    adapted.unload()
    return found


def load(folder: Path, adapters: dict[str, Path], **options: Any) -> auraflux.LanguageModel:
    return auraflux.load(folder, "cpu", kv="none", exact=True, calibrate="off", context=256, adapters=adapters, **options)


# PEFT warns of a pattern that only names a parameter, and honours it
@pytest.mark.filterwarnings("ignore:The following alpha_pattern keys")
@pytest.mark.parametrize(
    ("make", "config"),
    [
        (llama, {}),
        (llama, {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"layers.1.mlp.up_proj": 20}, "use_rslora": True}),
        (qwen3_moe, {"target_modules": [*ATTENTION, "gate"], "target_parameters": EXPERTS, "alpha_pattern": {EXPERTS[1]: 3}}),
        (qwen3_moe, {"target_modules": ["q_proj"], "target_parameters": EXPERTS[1:]}),
        (gemma3, {"target_modules": "all-linear"}),
    ],
    ids=["llama", "patterns", "experts", "one-stack", "gemma"],
)
def test_logits_are_those_of_peft(make: Any, config: dict[str, Any], tmp_path: Path):
    model = make()
    save(model, tmp_path / "model")
    ids = tokens(model, COUNT)
    base, expected = transformers_logits(model, ids), adapt(model, tmp_path / "adapter", **config)
    mine = load(tmp_path / "model", {"one": tmp_path / "adapter"})
    assert error(base, expected) > 0.05
    assert error(mine.logits(ids, adapter="one"), expected) < 1e-5
    assert error(mine.logits(ids), base) < 1e-5


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """Return a quantizable mixture and 8 adapters: of attention, experts, both, and of other ranks."""
    folder, model = tmp_path_factory.mktemp("mixture"), qwen3_moe()
    save(model, folder / "model")
    kinds: list[dict[str, Any]] = [
        {"target_modules": ATTENTION},
        {"target_modules": ATTENTION, "r": 16},
        {"target_modules": [*ATTENTION, "gate"], "target_parameters": EXPERTS},
        {"target_modules": ["v_proj"], "target_parameters": EXPERTS, "r": 2},
    ]
    for number in range(8):
        adapt(model, folder / f"a{number}", number, **kinds[number % 4])
    return folder / "model", {f"a{number}": folder / f"a{number}" for number in range(8)}


PROMPT = [5, 17, 99, 4, 201, 33, 8, 8, 120, 250, 3]


def generated(model: auraflux.LanguageModel, adapter: str | None, prompt: list[int] = PROMPT) -> list[int]:
    return list(model.tokens(prompt, max_tokens=12, temperature=0, adapter=adapter))


def test_eight_adapters_in_one_batch_equal_each_alone(mixture: tuple[Path, dict[str, Path]]):
    path, adapters = mixture
    names: list[str | None] = [*adapters, None]
    model = load(path, adapters, max_sequences=9)
    alone = [generated(model, name) for name in names]
    assert len(set(map(tuple, alone))) > 5
    model.reset()
    assert run_together(model, names) == alone


def run_together(model: auraflux.LanguageModel, names: list[str | None]) -> list[list[int]]:
    requests = [model._request(PROMPT, {"max_tokens": 12, "temperature": 0, "adapter": name}) for name in names]
    running = [model.scheduler.submit(request) for request in requests]
    model.scheduler.wait(lambda: all(sequence.finish_reason is not None for sequence in running))
    return [sequence.ids[len(PROMPT) :] for sequence in running]


def test_the_model_alone_gives_the_same_bits_with_adapters_loaded(mixture: tuple[Path, dict[str, Path]]):
    path, adapters = mixture
    plain, adapted = load(path, {}), load(path, adapters)
    assert torch.equal(plain.logits(PROMPT), adapted.logits(PROMPT))


def test_prefixes_are_not_shared_between_adapters(mixture: tuple[Path, dict[str, Path]]):
    path, adapters = mixture
    model = load(path, adapters)
    prompt = [7, *range(100, 230)]
    first = generated(model, "a2", prompt)
    assert generated(model, None, prompt) != first
    assert model.stats.reused_tokens == 0
    assert generated(model, "a2", prompt) == first
    assert model.stats.reused_tokens >= len(prompt) - 2


@pytest.mark.parametrize("speculate", ["ngram"])
def test_speculation_does_not_change_the_output(mixture: tuple[Path, dict[str, Path]], speculate: str):
    path, adapters = mixture
    plain, drafting = load(path, adapters), load(path, adapters, speculate=speculate)
    repeated = PROMPT * 4
    for name in ("a0", "a3"):
        assert generated(drafting, name, repeated) == generated(plain, name, repeated)


def test_a_preempted_sequence_keeps_its_adapter(mixture: tuple[Path, dict[str, Path]]):
    path, adapters = mixture
    names: list[str | None] = ["a1", "a2", None]
    model = load(path, adapters)
    alone = [generated(model, name) for name in names]
    model.reset()
    requests = [model._request(PROMPT, {"max_tokens": 12, "temperature": 0, "adapter": name}) for name in names]
    running = [model.scheduler.submit(request) for request in requests]
    for _ in range(4):
        model.scheduler.step()
    model.scheduler._preempt(auraflux.errors.CacheFull("no page is free"))
    model.scheduler.wait(lambda: all(sequence.finish_reason is not None for sequence in running))
    assert model.scheduler.counts.preemptions == 1
    assert [sequence.ids[len(PROMPT) :] for sequence in running] == alone


def test_a_quantized_model_takes_adapters(mixture: tuple[Path, dict[str, Path]]):
    path, adapters = mixture
    quantized = load(path, adapters, quantize=8)
    exact = load(path, adapters)
    for name in ("a0", "a2"):
        assert error(quantized.logits(PROMPT, name), exact.logits(PROMPT, name)) < 0.05


def test_steps_with_adapters_of_linear_layers_are_replayed(tmp_path: Path):
    model = llama()
    save(model, tmp_path / "model")
    adapt(model, tmp_path / "one")
    mine = load(tmp_path / "model", {"one": tmp_path / "one"})
    replayed, plain = (
        generated(mine, "one"),
        generated(load(tmp_path / "model", {"one": tmp_path / "one"}, graphs=False), "one"),
    )
    assert mine.engine.graphs.refused is None
    assert any(key[3] and step.recording for key, step in mine.engine.graphs._steps.items())
    assert replayed == plain


def changed(source: Path, folder: Path, **config: Any) -> Path:
    """Copy an adapter with other settings."""
    folder.mkdir()
    settings = json.loads((source / "adapter_config.json").read_text()) | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").write_bytes((source / "adapter_model.safetensors").read_bytes())
    return folder


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "has use_dora: DoRA scales the columns of every weight, which is not supported"),
        ({"bias": "all"}, "trains biases"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save: it replaces whole modules"),
        ({"peft_type": "IA3"}, "is a IA3 adapter; only LORA is supported"),
        ({"alpha_pattern": {"(a+)+b": 3}}, "has the pattern '(a+)+b'; only module names"),
        ({"r": "8", "lora_alpha": "x"}, "has lora_alpha = 'x'; a number is needed"),
    ],
)
def test_what_is_not_honoured_is_refused(
    mixture: tuple[Path, dict[str, Path]], config: dict[str, Any], message: str, tmp_path: Path
):
    path, adapters = mixture
    with pytest.raises(FormatError) as caught:
        load(path, {"one": changed(adapters["a0"], tmp_path / "one", **config)})
    assert message in str(caught.value)


def test_an_adapter_of_another_model_is_refused(mixture: tuple[Path, dict[str, Path]], tmp_path: Path):
    path, _ = mixture
    adapt(llama(), tmp_path / "llama")
    with pytest.raises(FormatError, match="which this model does not compute as linear layers"):
        load(path, {"one": tmp_path / "llama"})


def test_an_unknown_name_is_refused(mixture: tuple[Path, dict[str, Path]]):
    path, adapters = mixture
    with pytest.raises(InputError, match=r"there is no adapter 'b'\. There are a0, a1"):
        generated(load(path, adapters), "b")
    with pytest.raises(SettingsError, match="colon"):
        load(path, {"a:b": adapters["a0"]})


@pytest.mark.parametrize("make", [llama, qwen3_moe, gemma3])
def test_a_merged_model_is_the_model_with_the_adapter(make: Any, tmp_path: Path):
    model, config = make(), {"target_modules": ATTENTION}
    if make is qwen3_moe:
        config = {"target_modules": [*ATTENTION, "gate"], "target_parameters": EXPERTS}
    save(model, tmp_path / "model")
    ids = tokens(model, COUNT)
    base, expected = transformers_logits(model, ids), adapt(model, tmp_path / "adapter", **config)
    words = ["convert", str(tmp_path / "model"), str(tmp_path / "merged"), "--bits", "8", "--group-size", "32"]
    run = CliRunner().invoke(main, [*words, "--merge", str(tmp_path / "adapter")])
    assert run.exit_code == 0, run.output
    merged = load(tmp_path / "merged", {}).logits(ids)
    # 8 bits are a hundredth off
    assert error(base, expected) > 0.2
    assert error(merged, expected) < 0.05
