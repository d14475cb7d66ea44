"""Bytes of each token.

The decoders of the `tokenizers` package take complete lists of tokens. For those that language models use, each token has fixed
bytes, and the text is their concatenation as UTF-8; other decoders are refused.
"""

import json
import re
from typing import Any

import tokenizers

from auraflux.errors import FormatError

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _letters() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary: itself if visible, else one from U+0100 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(others)}


LETTERS = _letters()


class TokenBytes(dict[int, bytes]):
    """Bytes of tokens by id, computed on first use; empty for an id without a token.

    strips  whether the decoder drops one space at the beginning of a text
    """

    def __init__(self, inner: tokenizers.Tokenizer):
        super().__init__()
        self._inner = inner
        self.strips = False
        self._byte_level = self._byte_fallback = False
        self._replaced: list[tuple[str, str]] = []
        if inner.decoder is None:
            raise FormatError("The tokenizer has no decoder, which converts tokens to text.")
        self._parse_decoder(json.loads(inner.decoder.__getstate__()))

    def __missing__(self, token: int) -> bytes:
        spelled = self._inner.id_to_token(token) if 0 <= token < 1 << 32 else None
        piece = b"" if spelled is None else self._spell(spelled)
        self[token] = piece
        return piece

    def _spell(self, token: str) -> bytes:
        if self._byte_level:
            # added tokens are plain text and may contain characters that stand for no byte
            letters = [LETTERS.get(letter) for letter in token]
            return token.encode() if None in letters else bytes(letters)  # type: ignore[arg-type]
        if self._byte_fallback and (byte := BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for old, new in self._replaced:
            token = token.replace(old, new)
        return token.encode()

    def _parse_decoder(self, decoder: dict[str, Any]) -> None:
        match decoder:
            case {"type": "Sequence", "decoders": list(parts)}:
                for part in parts:
                    self._parse_decoder(part)
            case {"type": "ByteLevel"}:
                self._byte_level = True
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Fuse"} | {"type": "Strip", "start": 0, "stop": 0}:
                pass
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                self.strips = True
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._replaced.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)}:
                self._replaced.append((old, " "))
                self.strips |= decoder.get("prepend_scheme", "always") != "never"
            case _:
                shown = json.dumps(decoder)[:120]
                raise FormatError(f"The tokenizer has a decoder that cannot decode token by token: {shown}")
