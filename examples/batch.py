"""Complete several prompts in one batch, and compare the throughput with one prompt at a time.

python examples/batch.py [MODEL]
"""

import sys
import time

import auraflux

PROMPTS = [f"The capital of {country} is" for country in ("France", "Italy", "Japan", "Egypt")]
TOKENS = 16


def main(model: str | None) -> None:
    loaded = auraflux.load(model, context=256, max_sequences=len(PROMPTS))
    # compile the kernels of both batch sizes before timing
    loaded.generate_batch(PROMPTS, max_tokens=2, temperature=0)
    loaded.generate_batch(PROMPTS[:1], max_tokens=2, temperature=0)

    start = time.perf_counter()
    one_by_one = [loaded.generate_batch([prompt], max_tokens=TOKENS, temperature=0)[0] for prompt in PROMPTS]
    alone_s = time.perf_counter() - start

    start = time.perf_counter()
    together = loaded.generate_batch(PROMPTS, max_tokens=TOKENS, temperature=0)
    batch_s = time.perf_counter() - start

    for prompt, output in zip(PROMPTS, together, strict=True):
        print(f"{prompt}{output!r}")
    print(f"one by one {alone_s:.2f} s, one batch {batch_s:.2f} s, same output: {one_by_one == together}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
