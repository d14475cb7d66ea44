"""DeepSeek V3.2 and GLM 5, whose tokens choose what they attend to, against transformers and mlx-lm."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from auraflux.errors import FormatError
from auraflux.models.deepseek_v32 import Config
from tests.models.mlx_oracle import check_mlx, in_older_words, quantized
from tests.models.oracles import agreement, error, save, scores, tokens, truth
from tests.models.test_deepseek_v3 import SMALL, YARN, clear, rewrite

# with few heads many scores are 0, and which of equals are chosen is not said
INDEX = {"index_n_heads": 12, "index_head_dim": 32, "index_topk": 40}


def chooses(model: Any) -> Any:
    """A model whose indexers decide clearly, and whose choices matter."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "indexer.w" in name:
                tensor.normal_(0, 0.3)
    return clear(model)


def deepseek(**changes: Any) -> DeepseekV32ForCausalLM:
    torch.manual_seed(0)
    return chooses(DeepseekV32ForCausalLM(DeepseekV32Config(**{**SMALL, **INDEX, **changes})))


def glm(**changes: Any) -> GlmMoeDsaForCausalLM:
    torch.manual_seed(0)
    one = {"n_group": 1, "topk_group": 1}
    return chooses(GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**{**SMALL, **INDEX, **one, **changes})))


def glm_shared() -> GlmMoeDsaForCausalLM:
    """Its second layer goes by the first one's choice."""
    return glm(indexer_types=["full", "shared", "full"])


MODELS: dict[str, Any] = {
    "deepseek_v32": deepseek,
    "yarn": lambda: deepseek(rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "odd": lambda: deepseek(index_n_heads=11, index_head_dim=20, index_topk=7, attention_bias=True),
    "one-position": lambda: deepseek(index_topk=1),
    "all-positions": lambda: deepseek(index_topk=500),
    "glm_moe_dsa": glm,
    "glm_moe_dsa-shared": glm_shared,
}
QUICK = {"deepseek_v32", "glm_moe_dsa-shared"}
# what codes cost, at most: where few positions are chosen, another choice weighs more
COSTS = {"odd": 0.05, "one-position": 0.15}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in MODELS])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path):
    model = MODELS[name]()
    save(model, tmp_path)
    ids = tokens(model)
    wanted = truth(model, ids)
    for chunk in (512, 37, 1):
        assert error(scores(tmp_path, ids, chunk=chunk), wanted) < 2e-4
    coded = scores(tmp_path, ids, kv="k8v8")
    assert error(coded, wanted) < COSTS.get(name, 0.02)
    assert agreement(coded, wanted) >= 0.99


def test_the_choice_matters(tmp_path: Path):
    """The scores of all positions are others than those of chosen ones, from the first token on that has to choose."""
    model = deepseek()
    save(model, tmp_path)
    ids = tokens(model, 60)
    wanted = scores(tmp_path, ids)
    rewrite(tmp_path, load_file(tmp_path / "model.safetensors"), index_topk=500)
    found = scores(tmp_path, ids)
    assert torch.equal(found[:40], wanted[:40])
    assert error(found[40:], wanted[40:]) > 0.01


# of published configs, which transformers leaves out
SAID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}


def as_published(config: dict[str, Any]) -> dict[str, Any]:
    return {**SAID, **in_older_words(config)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_logits_are_those_of_mlx_lm(name: str, tmp_path: Path):
    model = MODELS[name]()
    words = {"deepseek_v32": as_published, "glm_moe_dsa": lambda config: {**SAID, **config}}[name]
    check_mlx(model, quantized(save(model, tmp_path / "hf"), tmp_path / "mlx", words))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_topk": None}, "has no 'index_topk'"),
        ({"q_lora_rank": None}, "has no 'q_lora_rank', which the indexer reads"),
        ({"index_head_dim": 8}, "index_head_dim 8, of which qk_rope_head_dim 16 are to be rotated"),
        ({"indexer_types": ["shared", "full", "full"]}, "the first must have its own"),
        ({"index_topk_pattern": "FS"}, "names 2 indexers for num_hidden_layers 3"),
    ],
)
def test_configs_that_cannot_be_honoured_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(FormatError, match=message):
        Config.from_hf({**DeepseekV32Config(**SMALL, **INDEX).to_dict(), **change})


def test_layers_with_an_indexer_may_be_said_in_three_ways():
    plain = DeepseekV32Config(**SMALL, **INDEX).to_dict()
    ways = {"indexer_types": ["full", "full", "shared"]}, {"index_topk_pattern": "FFS"}, {"index_topk_freq": 2}
    assert {Config.from_hf({**plain, **way}).index.layers for way in ways} == {(True, True, False)}
