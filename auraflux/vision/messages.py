"""Messages with images: content in parts, {"type": "text", "text": ...} and {"type": "image", "image": ...}."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from auraflux.errors import InputError
from auraflux.vision.image import decode_image

Message = dict[str, Any]


def take_images(messages: Sequence[Message]) -> tuple[list[Message], list[Any]]:
    """Return the messages as chat templates take them, and their images in order."""
    images: list[Any] = []
    found: list[Message] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = [_part(part, images) for part in content]
            message = {**message, "content": parts}
        found.append(message)
    return found, images


def _part(part: Any, images: list[Any]) -> dict[str, Any]:
    if isinstance(part, dict) and part.get("type") == "image" and part.get("image") is not None:
        images.append(part["image"])
        return {"type": "image"}
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    raise InputError('a part of a message must be {"type": "text", "text": ...} or {"type": "image", "image": ...}.')


def open_image(source: Any) -> Any:
    """Return a PIL image in RGB of a path, of a file's bytes, or of another PIL image."""
    if isinstance(source, bytes):
        return decode_image(source)
    if isinstance(source, str | Path):
        try:
            return decode_image(Path(source).read_bytes())
        except (OSError, ValueError) as err:
            if isinstance(err, InputError):
                raise InputError(f"{source}: {err}") from err
            raise InputError(f"{source} cannot be read: {getattr(err, 'strerror', None) or err}.") from err
    if hasattr(source, "convert") and hasattr(source, "size"):
        return source.convert("RGB")
    raise InputError(f"an image must be a path, bytes or a PIL image, not {type(source).__name__}.")
