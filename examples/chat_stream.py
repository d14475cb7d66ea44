"""Hold a conversation of two turns; the second turn reuses the KV cache of the first.

python examples/chat_stream.py [MODEL]
"""

import sys

import auraflux

QUESTIONS = ("Name one planet of the solar system.", "Is it larger than the Earth?")


def main(model: str | None) -> None:
    loaded = auraflux.load(model, context=512)
    messages = [{"role": "system", "content": "Answer in one short sentence."}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        print(f"> {question}")
        answer = ""
        for piece in loaded.chat(messages, max_tokens=40, temperature=0):
            answer += piece
            print(piece, end="", flush=True)
        messages.append({"role": "assistant", "content": answer})
        stats = loaded.stats
        print(f"\n({stats.prompt_tokens} prompt tokens computed, {stats.reused_tokens} reused)\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
