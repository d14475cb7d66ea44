"""What `--prefill fp8` costs: the KL divergence of rounded linear layers, `python -m bench.lab.fp8_prefill FILE.gguf`.

transformers runs the model with the weights of a GGUF file, dequantized to float32, on a CPU. Rows of activations and of
weights are rounded as `ops/linear/cuda/gemm/fp8.py` rounds them, for all tokens of a text.
"""

import sys
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

TOKENS = 1024  # of each text
LARGEST = 448.0  # of e4m3


def rounded(rows: Tensor) -> Tensor:
    """Return rows rounded to e4m3, each with a scale of its own."""
    scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-30) / LARGEST
    return (rows / scale).to(torch.float8_e4m3fn).float() * scale


def round_linears(model: nn.Module) -> None:
    """Round the operands of all linear layers but the LM head."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            layer.weight.data = rounded(layer.weight.data)
            layer.register_forward_pre_hook(lambda layer, inputs: (rounded(inputs[0]),))


@torch.inference_mode()
def logprobs(model: nn.Module, passages: list[Tensor]) -> list[Tensor]:
    return [model(passage[None]).logits[0].float().log_softmax(-1) for passage in passages]


def main() -> None:
    path = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    files = sorted((resources.files("auraflux.eval") / "texts").iterdir(), key=lambda file: file.name)
    passages = [
        tokenizer(file.read_text(), return_tensors="pt").input_ids[0][:TOKENS] for file in files if file.name.endswith("txt")
    ]
    exact = logprobs(model, passages)
    round_linears(model)
    for file, a, b in zip(files, exact, logprobs(model, passages), strict=False):
        kl = (a.exp() * (a - b)).sum(-1)
        print(
            f"{file.name}: KL {kl.mean():.4f}, same top token {(a.argmax(-1) == b.argmax(-1)).float().mean():.1%}", flush=True
        )


if __name__ == "__main__":
    main()
