"""Reasoning before the answer, between two tags; the prompt may contain the opening tag."""

from collections.abc import Sequence

from auraflux.serve.chat.deltas import Reasoning
from auraflux.serve.parse.text import Steps, TextStream, emit

ThinkTags = tuple[str, str]
THINK: ThinkTags = ("<think>", "</think>")


def thinking(text: TextStream, tags: Sequence[ThinkTags], prompt_tail: str) -> Steps[None]:
    """Parse reasoning, if there is any, and the white space around it."""
    opened = next((each for each in tags if prompt_tail.rstrip().endswith(each[0])), None)
    begin = text.hold()
    yield from text.space()
    for each in tags:
        # some models repeat the tag that ends the prompt
        if (yield from text.accept(each[0])):
            opened = each
            break
    text.release(None if opened else begin)
    if opened:
        yield from text.space()
        yield from emit(text.until((opened[1],), trim=True), Reasoning)
        yield from text.space()
