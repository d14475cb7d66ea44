"""Train the toy model of the folder model, a Qwen3.5 of 0.5 million parameters with a tower.

    python -m tests.vision.shapes.train FOLDER

The model and its backward pass are those of transformers. On two busy x86 cores training took 40 minutes. The weights in model/
saw pictures of up to three things until the last 430 steps, and an older tokenizer: another run makes other weights.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from random import Random

import numpy as np
import tokenizers
import torch
from PIL import Image
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from tests.vision.qwen_models import TEMPLATE
from tests.vision.shapes.data import (
    COLOURS,
    FACTS,
    NUMBERS,
    SHAPES,
    Box,
    Exchange,
    Thing,
    description,
    exchange,
    fact,
    picture,
    things,
)

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
    "<|video_pad|>",
]
IM_END, IMAGE = SPECIAL.index("<|im_end|>"), SPECIAL.index("<|image_pad|>")
PATCH, MERGE, FRAMES = 8, 2, 2
BLOCK = PATCH * MERGE
MOST_PIXELS = 4608
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 1024, "longest_edge": MOST_PIXELS},
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": FRAMES,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
TEXT = {
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "linear_attention", "full_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    },
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": IM_END,
    "pad_token_id": 0,
}
TOWER = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": FRAMES,
    "out_hidden_size": 96,
    "num_position_embeddings": 64,
}
# sides of an image in training; others are resized to at most as many pixels
SIZES = [(64, 64), (64, 48), (80, 48), (96, 48), (48, 64)]
TOWER_STEPS, TOWER_BATCH, TOWER_RATE = 1500, 32, 3e-3
STEPS, BATCH, RATE, WARMUP = 2500, 32, 2e-3, 50
LAST_STEPS, LAST_RATE = 700, 1.5e-3
IGNORED = -100  # a label without a loss
KINDS = 1 + len(COLOURS) * len(SHAPES)  # of things, with none


def train_tokenizer() -> tokenizers.Tokenizer:
    """Train byte-level BPE whose merges make a token of every word of the questions and answers."""
    made, all_things = tokenizers.Tokenizer(models.BPE()), [Thing(*each) for each in product(COLOURS, SHAPES)]
    questions = [f"Which colour is the {each.shape}? Which shape is {each.colour}? Is there {each}?" for each in all_things]
    answers = [description([one, another]) for one, another in pairwise(all_things)]
    others = ["What is in the picture? How many shapes are there? yes no", " ".join(NUMBERS)]
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=640, min_frequency=1, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    texts = [*questions, *answers, *others, *NUMBERS, *COLOURS, *(text for pair in FACTS.items() for text in pair)]
    made.train_from_iterator(["user\nassistant\n", *texts], trainer)
    return made


def make_model(vocabulary: int) -> Qwen3_5ForConditionalGeneration:
    torch.manual_seed(0)
    names = "vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id"
    tokens = {name: IMAGE - 1 + number for number, name in enumerate(names)}
    config = Qwen3_5Config(
        text_config={**TEXT, "vocab_size": vocabulary}, vision_config=TOWER, tie_word_embeddings=True, **tokens
    )
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    return Qwen3_5ForConditionalGeneration(config)


def patches(images: list[Image.Image]) -> tuple[Tensor, Tensor]:
    """Return the patches of images of one size, as transformers' processor makes them, and their grids."""
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).float() / 127.5 - 1
    count, height, width, _ = pixels.shape
    rows, columns = height // BLOCK, width // BLOCK
    split = pixels.view(count, rows, MERGE, PATCH, columns, MERGE, PATCH, 3).permute(0, 1, 4, 2, 5, 7, 3, 6)
    flat = split.unsqueeze(6).expand(*split.shape[:6], FRAMES, PATCH, PATCH).reshape(-1, 3 * FRAMES * PATCH * PATCH)
    return flat, torch.tensor([[1, rows * MERGE, columns * MERGE]] * count)


def tokens_of(tokenizer: tokenizers.Tokenizer, pairs: list[Exchange], images: list[int]) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation and its labels: answers are learned, questions are not.

    images  tokens of the image in front of each question, 0 for none
    """
    ids: list[int] = []
    labels: list[int] = []
    for (question, answer), size in zip(pairs, images, strict=True):
        image = f"<|vision_start|>{'<|image_pad|>' * size}<|vision_end|>" if size else ""
        asked = tokenizer.encode(f"<|im_start|>user\n{image}{question}<|im_end|>\n<|im_start|>assistant\n").ids
        told = tokenizer.encode(f"{answer}<|im_end|>").ids
        after = tokenizer.encode("\n").ids
        ids += asked + told + after
        labels += [IGNORED] * len(asked) + told + [IGNORED] * len(after)
    return ids, labels


def draw(shown: list[Thing], size: tuple[int, int], random: Random) -> tuple[Image.Image, list[Box]]:
    """Draw a picture, sharp or resized from twice its size."""
    scale = random.choice([1, 2])
    image, boxes = picture(shown, size, random, scale)
    return image if scale == 1 else image.resize(size, Image.Resampling.BICUBIC), boxes


def kinds_of(shown: list[Thing], boxes: list[Box], size: tuple[int, int]) -> list[int]:
    """Return the number of the thing in the middle of each block, row by row; 0 for none."""
    kinds = []
    for y in range(BLOCK // 2, size[1], BLOCK):
        for x in range(BLOCK // 2, size[0], BLOCK):
            inside = [left < x < right and top < y < bottom for left, top, right, bottom in boxes]
            kinds.append(shown[inside.index(True)].number if True in inside else 0)
    return kinds


def make_batch(tokenizer: tokenizers.Tokenizer, random: Random, count: int) -> dict[str, Tensor]:
    """Make conversations with one or two images of one size each, or none."""
    size = random.choice(SIZES)
    texts, asked, shots = random.random() < 0.05, random.choice([1, 2, 3]), random.choice([1] * 5 + [2])
    rows, images = [], []
    for _ in range(count):
        pairs: list[Exchange] = []
        sizes: list[int] = []
        for _ in range(shots):
            if texts:
                pairs += [fact(random) for _ in range(asked)]
                sizes += [0] * asked
                continue
            shown = things(random)
            images.append(draw(shown, size, random)[0])
            pairs += [fact(random) if number and random.random() < 0.1 else exchange(shown, random) for number in range(asked)]
            sizes += [size[0] * size[1] // BLOCK**2] + [0] * (asked - 1)
        rows.append(tokens_of(tokenizer, pairs, sizes))
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([each + [0] * (longest - len(each)) for each, _ in rows])
    labels = torch.tensor([each + [IGNORED] * (longest - len(each)) for _, each in rows])
    batch = {"input_ids": ids, "labels": labels, "mm_token_type_ids": (ids == IMAGE).int()}
    if images:
        batch["pixel_values"], batch["image_grid_thw"] = patches(images)
    return batch


def descend(parameters: list[torch.nn.Parameter], steps: int, rate: float, loss_of: Callable[[], Tensor]) -> None:
    """Train parameters with AdamW, a warm-up and a cosine schedule."""
    optimizer, start = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.01), time.monotonic()
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARMUP) * (0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)
    )
    for step in range(steps):
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.4f}, {time.monotonic() - start:.0f} s", flush=True)


def train_tower(tower: torch.nn.Module, random: Random) -> None:
    """Train the tower alone: a linear layer on its embeddings says which thing is in each block."""
    head = torch.nn.Linear(TOWER["out_hidden_size"], KINDS)

    def loss_of() -> Tensor:
        size, images, kinds = random.choice(SIZES), [], []
        for _ in range(TOWER_BATCH):
            shown = things(random)
            image, boxes = draw(shown, size, random)
            images.append(image)
            kinds += kinds_of(shown, boxes, size)
        found = head(tower(*patches(images)).pooler_output)
        return torch.nn.functional.cross_entropy(found, torch.tensor(kinds))

    descend([*tower.parameters(), *head.parameters()], TOWER_STEPS, TOWER_RATE, loss_of)


def train_answers(
    model: Qwen3_5ForConditionalGeneration, tokenizer: tokenizers.Tokenizer, random: Random, steps: int, rate: float
) -> None:
    """Train the parameters that have gradients, on the tokens of answers."""

    def loss_of() -> Tensor:
        batch = make_batch(tokenizer, random, BATCH)
        labels = batch.pop("labels")[:, 1:]
        model.model.rope_deltas = None
        hidden = model.model(**batch, use_cache=False).last_hidden_state[:, :-1]
        learned = labels != IGNORED
        return torch.nn.functional.cross_entropy(model.lm_head(hidden[learned]), labels[learned])

    descend([each for each in model.parameters() if each.requires_grad], steps, rate, loss_of)


def train(folder: Path) -> None:
    """Train the model and save it in bfloat16, with its tokenizer."""
    tokenizer, random = train_tokenizer(), Random(0)
    model = make_model(tokenizer.get_vocab_size()).train()
    print(f"{sum(each.numel() for each in model.parameters()):,} parameters, {tokenizer.get_vocab_size()} tokens")
    train_tower(model.model.visual, random)
    model.model.visual.requires_grad_(False)
    train_answers(model, tokenizer, random, STEPS, RATE)
    model.model.visual.requires_grad_(True)
    train_answers(model, tokenizer, random, LAST_STEPS, LAST_RATE)
    write(folder, model.eval(), tokenizer)


def write(folder: Path, model: Qwen3_5ForConditionalGeneration, tokenizer: tokenizers.Tokenizer) -> None:
    """Write the folder that `auraflux` loads."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "preprocessor_config": PREPROCESSOR,
        "tokenizer_config": {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"},
        "generation_config": {"eos_token_id": IM_END, "do_sample": False},
    }
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    train(parser.parse_args().folder)
