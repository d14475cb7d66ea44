"""Decode the images that clients send, under limits: one sentence for each reason to refuse."""

import io
from contextlib import suppress
from typing import Any

from auraflux.errors import BackendError, InputError

MAX_NBYTES = 32 << 20  # of a file
MAX_PIXELS = 50_000_000  # of a decoded image: 150 MB as RGB
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "AVIF")
KNOWN = "PNG, JPEG, WebP, GIF, BMP and AVIF are"
WHITE = (255, 255, 255, 255)


def decode_image(data: bytes) -> Any:
    """Return an image file as a PIL image in RGB: upright, over white where it is transparent, its first frame."""
    module, exif = _pillow()
    if len(data) > MAX_NBYTES:
        raise InputError(f"the image has {len(data):,} bytes; {MAX_NBYTES:,} are allowed.")
    if not data:
        raise InputError("the image is empty.")
    try:
        image = module.open(io.BytesIO(data), formats=[name for name in FORMATS if name in _readable(module)])
    except module.UnidentifiedImageError:
        raise InputError(f"the image is of an unknown format or damaged; {KNOWN} supported.") from None
    except (module.DecompressionBombWarning, module.DecompressionBombError):
        raise InputError(f"the image has too many pixels; {MAX_PIXELS:,} are allowed.") from None
    except Exception as err:
        raise _damaged(err) from err
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise InputError(f"the image has {width} x {height} pixels; {MAX_PIXELS:,} are allowed.")
    try:
        # the pixels of the first frame; a damaged file fails here
        image.load()
        with suppress(Exception):
            # an orientation that cannot be read is ignored
            image = exif(image)
        return _rgb(module, image)
    except Exception as err:
        raise _damaged(err) from err


def _pillow() -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageOps
    except ImportError as err:
        raise BackendError("images need the package pillow: pip install 'auraflux[images]'.") from err
    return Image, ImageOps.exif_transpose


def _readable(module: Any) -> set[str]:
    module.init()
    return set(module.OPEN)


def _damaged(err: Exception) -> InputError:
    return InputError(f"the image is damaged: {type(err).__name__}.")


def _rgb(module: Any, image: Any) -> Any:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        return module.alpha_composite(module.new("RGBA", image.size, WHITE), image).convert("RGB")
    if image.mode.startswith("I;16"):
        # 16 bits per pixel, which conversion would cut off at 255
        image = image.point(lambda value: value / 256).convert("L")
    return image.convert("RGB")
