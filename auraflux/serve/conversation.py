"""Messages as chat templates read them."""

from collections.abc import Iterator
from typing import Any

BILLING = "x-anthropic-billing-header"
Message = dict[str, Any]


def without_billing(text: str) -> str:
    """Drop the line that some clients put into the system prompt and change in each request: it would end every prefix."""
    if BILLING not in text:
        return text
    return "\n".join(line for line in text.split("\n") if not line.lstrip().startswith(BILLING))


def foldings(messages: list[Message]) -> Iterator[list[Message]]:
    """Give the messages as they are, then as templates want them that know a system message only first, or not at all."""
    yield messages
    told = "\n\n".join(message["content"] for message in messages if message["role"] == "system" and message["content"])
    rest = [message for message in messages if message["role"] != "system"]
    if len(rest) == len(messages):
        return
    merged: list[Message] = [{"role": "system", "content": told}, *rest]
    if merged != messages:
        yield merged
    if rest and rest[0]["role"] == "user":
        yield [{**rest[0], "content": f"{told}\n\n{rest[0]['content']}"}, *rest[1:]]
