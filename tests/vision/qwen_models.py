"""Small random Qwen3.5 models with towers, and their transformers processors."""

import io
import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import tokenizers
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.models.oracles import save
from tests.models.test_qwen3_5_moe import DENSE, MIXED, SMALL
from tests.tested import external_oracle
from tests.tokenizer.toy_tokenizers import byte_level, folder

IMAGE, START, END, VIDEO = 250, 251, 252, 253
TOKENS = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": VIDEO}
VISION = {
    "depth": 2,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_heads": 3,
    "patch_size": 4,
    "out_hidden_size": 128,
    "num_position_embeddings": 49,
}
PREPROCESSOR = {
    "size": {"shortest_edge": 256, "longest_edge": 8192},
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}


# like those of models that take images
TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}
{%- endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@cache
def chat_folder(mixture: bool = False) -> Path:
    """Return the folder of a model with a tokenizer and a chat template."""
    path = Path(mkdtemp(prefix="auraflux-tiny-"))
    tokenizer = tokenizers.Tokenizer.from_str(byte_level().to_str())
    special = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
    tokenizer.add_special_tokens(special)
    ids = [tokenizer.token_to_id(name) for name in special]
    names = "vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id"
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 0, "mixture": mixture}
    make(path, tokens=dict(zip(names, ids, strict=True)), **sizes)
    return folder(path, tokenizer, tokenizer_config={"chat_template": TEMPLATE, "eos_token": "<|im_end|>"})


def make(
    path: Path,
    vision: dict[str, Any] | None = None,
    tokens: dict[str, int] | None = None,
    mixture: bool = False,
    **text: Any,
) -> Any:
    """Save a model with a tower, dense or a mixture; return the transformers model."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.25}
    kind, like = (
        (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration) if mixture else (Qwen3_5Config, Qwen3_5ForConditionalGeneration)
    )
    config = kind(
        text_config={**SMALL, **(MIXED if mixture else DENSE), "rope_parameters": rope, **text},
        vision_config={**VISION, **(vision or {})},
        **(tokens or TOKENS),
    )
    torch.manual_seed(0)
    model = like(config).eval()
    save(model, path)
    with torch.no_grad():
        # the next token shall depend on the whole prompt, not on the last one
        model.get_output_embeddings().weight.sub_(4 * model.get_input_embeddings().weight.roll(1, 0))
        model.get_input_embeddings().weight.div_(4)
    model.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return model


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Return an image of smooth noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (5, 7, 4), np.uint8)
    return Image.fromarray(noise, "RGBA").resize((width, height), Image.Resampling.BICUBIC).convert(mode)


@external_oracle("transformers")
def patches(images: list[Image.Image]) -> dict[str, Tensor]:
    """Return the patches and grids that transformers makes."""
    return dict(Qwen2VLImageProcessorPil(**PREPROCESSOR)(images, return_tensors="pt"))


@external_oracle("transformers")
def model_logits(model: Any, ids: list[int], images: list[Image.Image]) -> Tensor:
    """Return the logits of transformers after each token of a prompt with images, [T, V]."""
    tokens = torch.tensor([ids])
    with torch.no_grad():
        model.model.rope_deltas = None
        return model(tokens, mm_token_type_ids=(tokens == IMAGE).int(), **patches(images)).logits[0].float()


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    """Return an image as a file."""
    made = io.BytesIO()
    image.save(made, kind)
    return made.getvalue()
