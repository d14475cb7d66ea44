"""Record which experts a real model's tokens choose: `python -m bench.lab.record_routing MODEL out.safetensors`.

`auraflux bench model --random --routing out.safetensors` lets a random model of the same number of experts repeat it.
"""

import argparse
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor

import auraflux
from auraflux.bench.routing import IDS
from auraflux.ops import route
from auraflux.weights.experts.resident import MixtureInput, ResidentExperts


def record(model: auraflux.LanguageModel, tokens: list[int]) -> Tensor:
    """Return the experts of each token in each mixture layer: int16 [T, L, k]."""
    chosen: dict[int, Tensor] = {}
    forward = ResidentExperts.forward

    def recorded(self: ResidentExperts, inputs: MixtureInput) -> Tensor:
        # the last layer runs separately for the tokens that need logits
        chosen.setdefault(id(self), route(inputs.scores, inputs.routing, inputs.bias)[0])
        return forward(self, inputs)

    with patch.object(ResidentExperts, "forward", recorded):
        model.logits(tokens)
    return torch.stack([each.sort(1).values for each in chosen.values() if len(each) == len(tokens)], 1).to(torch.int16)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, default=Path(auraflux.__file__).parent / "eval" / "texts", help="file, or folder")
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    model = auraflux.load(options.model, device="cpu", graphs=False)
    files = sorted(options.text.iterdir()) if options.text.is_dir() else [options.text]
    text = "\n".join(each.read_text(encoding="utf-8") for each in files)
    ids = record(model, model.tokenizer.encode(text)[: options.tokens])
    save_file({IDS: ids.contiguous()}, options.out)
    print(f"{options.out}: {ids.shape[0]} tokens, {ids.shape[1]} layers, {ids.shape[2]} experts per token")


if __name__ == "__main__":
    main()
