"""Compare quantized KV caches with a full-precision one: memory, and agreement of the next-token distributions.

python examples/kv_cache_bits.py [MODEL]
"""

import sys

import torch

import auraflux

PROMPT = (
    "The water cycle describes how water moves on, above and below the surface of the Earth. Water evaporates from the sea, "
    "rises, cools and condenses to clouds. Rain and snow fall on land, and rivers carry the water back to the sea. "
)
REPEATS = 4


def measure(model: str | None, kv: str) -> tuple[torch.Tensor, int]:
    """Return the logits after every token of the prompt, and the bytes of the KV cache."""
    loaded = auraflux.load(model, kv=kv, context=1024)
    logits = loaded.logits(PROMPT * REPEATS).log_softmax(-1)
    list(loaded.generate(PROMPT * REPEATS, max_tokens=1, temperature=0))
    return logits, loaded.stats.cache_nbytes


def main(model: str | None) -> None:
    reference, full = measure(model, "none")
    print(f"{'kv':6} {'cache':>10} {'ratio':>6} {'same top token':>15} {'mean KL':>9}")
    print(f"{'none':6} {full / 1e6:7.2f} MB {1:5.1f}x {1:15.1%} {0:9.5f}")
    for kv in ("k8v4", "k4v4", "k2v2"):
        logits, nbytes = measure(model, kv)
        same = (logits.argmax(-1) == reference.argmax(-1)).float().mean().item()
        kl = (reference.exp() * (reference - logits)).sum(-1).mean().item()
        print(f"{kv:6} {nbytes / 1e6:7.2f} MB {full / nbytes:5.1f}x {same:15.1%} {kl:9.5f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
