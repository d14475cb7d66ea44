"""How often a layer's router predicts the experts of the next: `python -m bench.lab.early_router MODEL …`.

The next layer's router runs on the residual stream before this layer's experts, or with `--late` after them. For each pair of
layers: the share of predicted experts that the next layer uses, by rank, and that of the first predicted one that a cache of
some of the experts does not hold, which is the one that is prefetched on a GPU.
"""

import argparse
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

import auraflux
from auraflux.ops import route
from auraflux.weights.experts.resident import ExpertPredictor, MixtureInput, ResidentExperts

Pair = tuple[Tensor, Tensor | None]  # experts of a layer's tokens, and those predicted for the next: [T, k]


def record(name: str, text: str, tokens: int, late: bool) -> list[Pair]:
    """Return the experts of each layer of a model that reads a text, and the predictions before or after they run."""
    predictors: dict[int, ExpertPredictor | None] = {}
    found: list[Pair] = []
    forward = ResidentExperts.forward

    def keep(self: ResidentExperts, predictor: ExpertPredictor | None) -> None:
        predictors[id(self)] = predictor

    def recorded(self: ResidentExperts, inputs: MixtureInput) -> Tensor:
        predictor = predictors.get(id(self))
        used = route(inputs.scores, inputs.routing, inputs.bias)[0]
        result = forward(self, inputs)
        found.append((used, None if predictor is None else predictor(result if late else inputs.residual)))
        return result

    with patch.object(ResidentExperts, "prefetch_with", keep):
        model = auraflux.load(name, device="cpu", graphs=False)
    with patch.object(ResidentExperts, "forward", recorded):
        model.logits(model.tokenizer.encode(text)[:tokens])
    return found


def rates(predicted: Tensor, used: Tensor, cached: float) -> tuple[list[float], float]:
    """Return the share of right predictions by rank, and that of the first one that is not cached."""
    right = (predicted[:, :, None] == used[:, None, :]).any(2)
    absent = torch.rand(len(used), int(max(predicted.max(), used.max())) + 1) >= cached
    missing = absent.gather(1, predicted.long())
    some, first = missing.any(1), missing.int().argmax(1, keepdim=True)
    return right.float().mean(0).tolist(), float(right.gather(1, first)[some].float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", nargs="+")
    parser.add_argument("--text", type=Path, default=Path(auraflux.__file__).parent / "eval" / "texts", help="file, or folder")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--cached", type=float, default=1 / 3, help="share of the experts that are cached, by chance")
    parser.add_argument("--late", action="store_true", help="predict after this layer's experts")
    options = parser.parse_args()
    files = sorted(options.text.iterdir()) if options.text.is_dir() else [options.text]
    text = "\n".join(each.read_text(encoding="utf-8") for each in files)
    torch.manual_seed(0)
    for name in options.model:
        pairs = record(name, text, options.tokens, options.late)
        for layer, ((_, predicted), (used, _)) in enumerate(pairwise(pairs)):
            if predicted is not None and len(predicted) == len(used):
                ranks, first = rates(predicted, used, options.cached)
                shown = ", ".join(f"{each:.2f}" for each in ranks)
                print(
                    f"{Path(name).name}, layer {layer} to {layer + 1}: first missing {first:.2f}, by rank {shown}", flush=True
                )


if __name__ == "__main__":
    main()
