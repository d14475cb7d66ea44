"""`--image`: pictures that go with a message."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

image_option = click.option(
    "--image",
    "images",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Picture to show the model with the message, before its text; may be given several times; implies --chat.",
)


def user_message(text: str, images: Sequence[Path]) -> dict[str, Any]:
    """Return a user's message: its images, then its text."""
    if not images:
        return {"role": "user", "content": text}
    pictures = [{"type": "image", "image": path} for path in images]
    return {"role": "user", "content": [*pictures, {"type": "text", "text": text}]}
