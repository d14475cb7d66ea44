"""Mixtures that mlx-lm converts to MXFP4 and NVFP4; it keeps routers at 8 bits, affine, and does not name their mode."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.mlx_oracle import check_mlx, legacy_config, quantized
from tests.models.oracles import save
from tests.models.test_deepseek_v3 import deepseek
from tests.models.test_deepseek_v32 import as_published
from tests.models.test_deepseek_v32 import deepseek as deepseek_v32
from tests.models.test_ernie4_5_moe import ernie
from tests.models.test_gemma4_text import for_mlx as gemma4_keys
from tests.models.test_gemma4_text import mixture
from tests.models.test_glm4_moe import for_mlx as glm_keys
from tests.models.test_glm4_moe import glm, minimax
from tests.models.test_gpt_oss import YARN, gpt_oss, under_mlx_names
from tests.models.test_qwen3_5_moe import next_for_mlx, qwen3_next
from tests.models.test_qwen3_moe import for_mlx as qwen3_keys
from tests.models.test_qwen3_moe import mixtral, olmoe, qwen2_moe, qwen3_moe, scale_embeddings


def without_window(model: Any) -> Any:
    """Drop the sliding window, which mlx-lm ignores."""
    model.config.sliding_window = None
    return model


Write = Callable[[Any, Path], Path]
FAMILIES: dict[str, tuple[Callable[[], Any], Any, Write]] = {
    "qwen3_moe": (qwen3_moe, qwen3_keys, save),
    "qwen2_moe": (qwen2_moe, legacy_config, save),
    "olmoe": (olmoe, legacy_config, save),
    "mixtral": (lambda: without_window(mixtral()), legacy_config, save),
    "glm4_moe": (glm, glm_keys, save),
    "minimax_m2": (minimax, glm_keys, save),
    "deepseek_v3": (deepseek, legacy_config, save),
    "deepseek_v32": (deepseek_v32, as_published, save),
    "ernie4_5_moe": (lambda: ernie(0.0, tie_word_embeddings=False), legacy_config, save),
    "gemma4": (mixture, gemma4_keys, save),
    "qwen3_next": (lambda: scale_embeddings(qwen3_next()), next_for_mlx, save),
    "gpt_oss": (lambda: gpt_oss(rope_parameters=YARN), legacy_config, under_mlx_names),
}


def named_formats() -> list[Any]:
    pairs = [(name, mode) for name in FAMILIES for mode in ("mxfp4", "nvfp4")]
    return [pytest.param(*pair, marks=[] if pair == ("qwen3_moe", "mxfp4") else pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(("name", "mode"), named_formats())
def test_folders_of_other_modes_match_mlx_lm(name: str, mode: str, tmp_path: Path):
    torch.manual_seed(0)
    make, change, write = FAMILIES[name]
    model = make()
    check_mlx(model, quantized(write(model, tmp_path / "hf"), tmp_path / "mlx", change, None, None, mode))
