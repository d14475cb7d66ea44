"""Serve a model and talk to it with OpenAI's client: one streamed answer.

pip install '.[serve]' openai
python examples/openai_client.py [MODEL]
"""

import sys

from local_server import serving
from openai import OpenAI


def main(model: str | None) -> None:
    with serving(model, "--context", "512") as url, OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        name = client.models.list().data[0].id
        print(f"{name} at {url}")
        stream = client.chat.completions.create(
            model=name,
            messages=[{"role": "user", "content": "Name the capital of France."}],
            max_tokens=40,
            temperature=0,
            stream=True,
        )
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
