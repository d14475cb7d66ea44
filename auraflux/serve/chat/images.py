"""Images in requests: where each comes from, and how it is decoded, in a worker thread."""

import base64
import binascii
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from auraflux.errors import ContextError, InputError
from auraflux.serve.chat.image_fetch import fetch_image
from auraflux.serve.transport.link import ModelFacts
from auraflux.vision.image import MAX_NBYTES, decode_image
from auraflux.vision.span import PreparedImage

Content = str | list[dict[str, Any]]  # of a message
DATA_URL = re.compile(r"data:([^;,]*)((?:;[^;,]*)*),", re.IGNORECASE)
MAX_URL = 4096  # characters
DECODED_AT_ONCE = 2  # images, each of which may take hundreds of MB
_slots = threading.BoundedSemaphore(DECODED_AT_ONCE)


@dataclass(frozen=True)
class ImageSource:
    """An image of a request, not decoded yet.

    where  its place in the request, for error messages
    data   base64; empty where it has a URL
    url    http or https
    """

    where: str
    data: str = ""
    url: str = ""

    @classmethod
    def of_url(cls, url: Any, where: str) -> "ImageSource":
        """Return the source of a data URL or of an http(s) URL."""
        if not isinstance(url, str) or not url:
            raise InputError(f"{where} has no image: a data URL is needed.")
        if url[:5].lower() == "data:":
            found = DATA_URL.match(url[:MAX_URL])
            if found is None or not found[1].lower().startswith("image/") or ";base64" not in found[2].lower():
                raise InputError(f"{where} is not an image: its data URL must begin with data:image/...;base64,")
            return cls(where, url[found.end() :])
        if not url[:8].lower().startswith(("http://", "https://")) or len(url) > MAX_URL:
            raise InputError(f"{where} has the URL {url[:80]!r}; data:, http: and https: URLs are supported.")
        return cls(where, url=url)

    def read(self, image_urls: bool) -> bytes:
        """Return the file; fetch it if the server may."""
        if self.url:
            if not image_urls:
                raise InputError("this server fetches no images: send the image itself as a data URL, or start it with "
                                 "--allow-image-urls.")  # fmt: skip
            return fetch_image(self.url)
        if len(self.data) > MAX_NBYTES * 4 // 3 + 4:
            raise InputError(f"the image has more than {MAX_NBYTES:,} bytes.")
        try:
            return base64.b64decode("".join(self.data.split()), validate=True)
        except (binascii.Error, ValueError):
            raise InputError("the image is not valid base64.") from None


def content_of(parts: Sequence[str | ImageSource]) -> Content:
    """Return a message's content for chat templates: a string, or parts where some are images."""
    if not any(isinstance(part, ImageSource) for part in parts):
        return "\n".join(part for part in parts if isinstance(part, str))
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts]


def joined(first: Content, second: Content, between: str) -> Content:
    """Return two contents as one, with a text between them where both have some."""
    if isinstance(first, str) and isinstance(second, str):
        return first + (between if first and second else "") + second
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in (first, second)]
    return [part for each in parts for part in each if part.get("text") != ""]


def prepare_images(sources: Sequence[ImageSource], facts: ModelFacts, image_urls: bool) -> list[PreparedImage]:
    """Decode and resize the images of a request for its model."""
    if sources and facts.images is None:
        reason = f": {facts.no_images}" if facts.no_images else ""
        raise InputError(f"{sources[0].where} is an image, and the model {facts.name} takes text only{reason}.")
    prepared: list[PreparedImage] = []
    tokens = 0
    for source in sources:
        assert facts.images is not None
        try:
            data = source.read(image_urls)
            with _slots:
                prepared.append(facts.images.prepare(decode_image(data)))
        except InputError as err:
            raise InputError(f"{source.where}: {err}") from err
        tokens += prepared[-1].grid[0] * prepared[-1].grid[1]
        if tokens >= facts.context:
            raise ContextError(
                f"{source.where}: the images take {tokens} tokens or more; the context is limited to {facts.context}."
            )
    return prepared
