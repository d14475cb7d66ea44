"""What a model thinks before it answers, between two marks; the prompt may have written the first."""

from collections.abc import Sequence

from auraflux.serve.deltas import Reasoning
from auraflux.serve.parse.text import Steps, Text, told

# what stands before and behind it
Marks = tuple[str, str]
THINK: Marks = ("<think>", "</think>")


def thinking(text: Text, marks: Sequence[Marks], prompt_tail: str) -> Steps[None]:
    """Read what is thought, if anything is, and the white space around it."""
    opened = next((each for each in marks if prompt_tail.rstrip().endswith(each[0])), None)
    begin = text.hold()
    yield from text.space()
    for each in marks:
        # some models write the mark again that the prompt ends with
        if (yield from text.takes(each[0])):
            opened = each
            break
    text.release(None if opened else begin)
    if opened:
        yield from text.space()
        yield from told(text.until((opened[1],), trim=True), Reasoning)
        yield from text.space()
