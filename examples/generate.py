"""Complete a prompt, print it as it streams, then print the statistics.

python examples/generate.py [MODEL]
"""

import sys

import auraflux

PROMPT = "The three primary colors are"


def main(model: str | None) -> None:
    loaded = auraflux.load(model, context=512)
    print(PROMPT, end="", flush=True)
    for piece in loaded.generate(PROMPT, max_tokens=40, temperature=0.7, top_p=0.95, seed=1):
        print(piece, end="", flush=True)
    stats = loaded.stats
    print(f"\n\n{stats.prompt_tokens} prompt tokens, {stats.tokens} generated, {stats.decode_rate:.1f} tokens/s")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
