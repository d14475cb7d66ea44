"""Measure a trained model on held-out documents: loss, copying over a distance, fact retrieval, generation."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.train.documents import Documents
from bench.train.forward import forward
from bench.train.shapes import Config, Parameters

PASSAGE, LEAD = 64, 8
LENGTHS = (512, 2048, 4000, 6000)
DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)


def measure_all(config: Config, p: Parameters, data: Path, longest: int) -> dict[str, Any]:
    """Run all measurements at up to `longest` tokens."""
    documents = Documents(data, seed=12345)
    found: dict[str, Any] = {"loss": round(loss(config, p, documents, min(longest, 1024)), 4)}
    for distance in (each for each in LENGTHS if each <= longest):
        found[f"copy {distance}"] = round(copy(config, p, documents, distance), 3)
    for length in (each for each in LENGTHS if each <= longest):
        right, share = needle(config, p, documents, length)
        found[f"needle {length}"], found[f"needle share {length}"] = round(right, 3), round(share, 3)
    found["text"] = generate(config, p, documents, data)
    return found


def scores(config: Config, p: Parameters, ids: np.ndarray) -> Tensor:
    """Return the logits [B, S, V] of tokens [B, S]."""
    device = p["model.embed_tokens.weight"].device
    hidden, _ = forward(config, p, torch.from_numpy(ids).to(device))
    return F.linear(hidden, p["model.embed_tokens.weight"]).float()


def loss(config: Config, p: Parameters, documents: Documents, length: int, rows: int = 16) -> float:
    """Return the mean loss on the held-out addresses."""
    starts = np.linspace(0, len(documents.held) - length - 1, rows).astype(int)
    ids = np.stack([documents.held[start : start + length] for start in starts])
    ids[:, 0] = documents.begin
    total = 0.0
    for row in ids:
        found = scores(config, p, row[None])[0, :-1]
        total += float(F.cross_entropy(found, torch.from_numpy(row[1:]).to(found.device)))
    return total / rows


def copy(config: Config, p: Parameters, documents: Documents, distance: int, tries: int = 8) -> float:
    """Return the share of correct tokens when a passage repeats after `distance` tokens."""
    right = 0.0
    for _ in range(tries):
        text = documents.piece(distance, documents.held)
        row = np.concatenate([[documents.begin], text, text[:PASSAGE]])
        best = scores(config, p, row[None])[0, distance + LEAD : distance + PASSAGE].argmax(-1).cpu().numpy()
        right += float((best == row[distance + LEAD + 1 : distance + PASSAGE + 1]).mean())
    return right / tries


def needle(config: Config, p: Parameters, documents: Documents, length: int) -> tuple[float, float]:
    """Return how often the right one of five words is the most likely end of a fact, and its mean probability."""
    pieces, right, share = documents.pieces, [], []
    places, words = pieces["held_out_places"], pieces["held_out_words"]
    first, middle, last = pieces["facts"][0]
    for turn in range(len(words)):
        values = [words[(i + turn) % len(words)] for i in range(len(words))]
        statements = [[*first, *place, *middle, *word, *last] for place, word in zip(places, values, strict=True)]
        text = documents.piece(length - sum(map(len, statements)), documents.held)
        prompt, at = [documents.begin], 0
        for depth, fact in zip(DEPTHS, statements, strict=True):
            prompt += [*text[at : round(depth * len(text))], *fact]
            at = round(depth * len(text))
        prompt += [*text[at:]]
        for index, place in enumerate(places):
            likely = likelihoods(config, p, [*prompt, *first, *place, *middle], values)
            right.append(float(likely.argmax() == index))
            share.append(float(likely.softmax(0)[index]))
    return float(np.mean(right)), float(np.mean(share))


def likelihoods(config: Config, p: Parameters, begun: list[int], endings: list[list[int]]) -> Tensor:
    """Return the log probability of each ending."""
    table, longest = p["model.embed_tokens.weight"], max(map(len, endings))
    rows = np.array([[*begun, *ending, *[0] * (longest - len(ending))] for ending in endings])
    hidden, _ = forward(config, p, torch.from_numpy(rows).to(table.device))
    found = F.linear(hidden[:, len(begun) - 1 : -1], table).float().log_softmax(-1)
    return torch.stack([found[i, range(len(ending)), ending].sum() for i, ending in enumerate(endings)]).cpu()


def generate(config: Config, p: Parameters, documents: Documents, data: Path, count: int = 40) -> list[str]:
    """Generate from three prompts, greedily."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(data / "tokenizer.json"))
    made = []
    for begun in (
        "The people of the United States",
        "<|user|>Say the word river.<|end|><|assistant|>",
        "<|user|>Hello<|end|><|assistant|>",
    ):
        ids = tokenizer.encode(begun).ids
        for _ in range(count):
            ids.append(int(scores(config, p, np.array([ids]))[0, -1].argmax()))
            if ids[-1] == documents.pieces["end"]:
                break
        made.append(tokenizer.decode(ids, skip_special_tokens=False))
    return made
