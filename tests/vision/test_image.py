"""Decoding what clients send: modes, orientation, first frames, and files that are damaged or hostile."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from auraflux.errors import InputError
from auraflux.vision import image as decoding
from auraflux.vision.image import decode_image
from tests.vision.qwen_models import file_of, picture

# formats, and about the bytes of their headers
KINDS = {"PNG": 64, "JPEG": 64, "WEBP": 64, "GIF": 64, "AVIF": 320}


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """Return a PNG file that claims a size."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def avif(width: int, height: int) -> bytes:
    """Return an AVIF file that claims a size."""
    made = file_of(picture(30, 20), "AVIF")
    at = made.index(b"ispe") + 8
    return made[:at] + struct.pack(">II", width, height) + made[at + 8 :]


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "CMYK", "I;16"])
def test_modes_become_rgb(mode):
    source = picture(31, 17)
    made = Image.fromarray(np.asarray(source.convert("L"), np.uint16) * 257) if mode == "I;16" else source.convert(mode)
    found = decode_image(file_of(made, "JPEG" if mode == "CMYK" else "PNG"))
    assert (found.mode, found.size) == ("RGB", (31, 17))
    gray = np.asarray(source.convert("L"), int)
    if mode in ("L", "I;16"):
        assert np.abs(np.asarray(found, int) - gray[..., None]).max() <= 1


def test_transparency_lies_over_white():
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    clear.putpixel((0, 0), (10, 20, 30, 255))
    found = decode_image(file_of(clear))
    assert (found.getpixel((0, 0)), found.getpixel((1, 1))) == ((10, 20, 30), (255, 255, 255))


def test_photos_stand_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by 90 degrees
    made = io.BytesIO()
    picture(40, 20).save(made, "JPEG", exif=exif)
    assert decode_image(made.getvalue()).size == (20, 40)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_counts(kind):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime")]
    made = io.BytesIO()
    frames[0].save(made, kind, save_all=True, append_images=frames[1:], **({"lossless": True} if kind == "WEBP" else {}))
    assert decode_image(made.getvalue()).getpixel((3, 3)) == (255, 0, 0)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "is empty"),
    "text": (b"hello, I am a picture", "unknown format or damaged"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "unknown format or damaged"),
    "a size bomb": (png(60_000, 60_000), "pixels"),
    "just too large": (png(8000, 7000), "8000 x 7000 pixels"),
    "no data": (png(100, 100), "damaged"),
    "a data bomb": (png(10, 10, zlib.compress(bytes(1 << 24))), ""),
    "cut off": (file_of(picture(90, 90), "JPEG")[:300], "damaged"),
    "an AVIF bomb": (avif(60_000, 60_000), "damaged|pixels"),
    "no AVIF frame": (file_of(picture(90, 90), "AVIF")[:300], "damaged"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_get_one_sentence(name):
    data, message = HOSTILE[name]
    if not message:
        assert decode_image(data).size == (10, 10)
        return
    with pytest.raises(InputError, match=message) as raised:
        decode_image(data)
    assert "\n" not in str(raised.value)


def test_large_files_are_refused(monkeypatch):
    monkeypatch.setattr(decoding, "MAX_NBYTES", 100)
    with pytest.raises(InputError, match="100 are allowed"):
        decode_image(file_of(picture(90, 90)))


def _decoded(data: bytes) -> Any:
    """Return an image, or the sentence that refuses it."""
    try:
        return decode_image(data)
    except InputError as err:
        return str(err)


def _fuzzed(seed: int) -> bytes:
    """Return a file with a few bytes of its first ones replaced, cut off or repeated."""
    chance = np.random.default_rng(seed)
    kind, header = list(KINDS.items())[seed % len(KINDS)]
    data = bytearray(file_of(picture(*chance.integers(1, 60, 2).tolist(), seed=seed), kind))
    for _ in range(chance.integers(1, 6)):
        match chance.integers(4):
            case 0:
                data[chance.integers(min(len(data), header))] = chance.integers(256)
            case 1:
                at = chance.integers(min(len(data), header))
                data[at : at + 4] = chance.bytes(4)
            case 2:
                data = data[: chance.integers(1, len(data) + 1)]
            case _:
                at = chance.integers(len(data))
                data[at:at] = data[at : at + chance.integers(1, 64)]
    return bytes(data)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_fuzzed_headers_neither_crash_nor_take_memory():
    import resource

    decode_image(file_of(picture(50, 50)))
    before, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for seed in range(2000):
        found = _decoded(_fuzzed(seed))
        if isinstance(found, str):
            refused += 1
            assert len(found) < 200
            assert "\n" not in found
        else:
            assert found.mode == "RGB"
            assert found.width * found.height <= decoding.MAX_PIXELS
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert refused > 500
    # an image of the most pixels, in RGB and once more while it is converted
    assert grown < 8 * decoding.MAX_PIXELS
