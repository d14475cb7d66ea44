"""Serve a model and ask for JSON that follows a schema: the grammar allows no other tokens.

pip install '.[serve]' openai
python examples/structured_output.py [MODEL]
"""

import json
import sys

from local_server import serving
from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome", "Berlin"]}, "capital": {"type": "boolean"}},
    "required": ["city", "capital"],
    "additionalProperties": False,
}


def main(model: str | None) -> None:
    with serving(model, "--context", "512") as url, OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "Which city is the Eiffel Tower in? Is it a capital? Answer as JSON."}],
            response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
            max_tokens=100,
            temperature=0,
        )
    print(json.loads(answer.choices[0].message.content or ""))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
