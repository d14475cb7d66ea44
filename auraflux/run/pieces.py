"""The bytes of each token.

The decoders of the `tokenizers` package take whole lists. Those that language models use come to bytes that belong to a token,
whatever its neighbours are, joined and read as UTF-8; others are refused.
"""

import json
import re
from typing import Any

import tokenizers

from auraflux.errors import FormatError

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _letters() -> dict[str, int]:
    """The letter that stands for each byte in a byte-level vocabulary: itself if it can be seen, else one from U+0100 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + place): byte for place, byte in enumerate(unseen)}


LETTERS = _letters()


class Pieces(dict[int, bytes]):
    """The bytes of tokens by number, made when first asked for; a number that is no token has none.

    strips  whether a space at the very beginning of a text is not part of it
    """

    def __init__(self, inner: tokenizers.Tokenizer):
        super().__init__()
        self._inner = inner
        self.strips = False
        self._byte_level = self._byte_fallback = False
        self._replaced: list[tuple[str, str]] = []
        if inner.decoder is None:
            raise FormatError("The tokenizer has no decoder: it is not known how its tokens become text.")
        self._learn(json.loads(inner.decoder.__getstate__()))

    def __missing__(self, token: int) -> bytes:
        spelled = self._inner.id_to_token(token) if 0 <= token < 1 << 32 else None
        piece = b"" if spelled is None else self._spell(spelled)
        self[token] = piece
        return piece

    def _spell(self, token: str) -> bytes:
        if self._byte_level:
            # added tokens are spelled as they are, and may have letters that stand for no byte
            letters = [LETTERS.get(letter) for letter in token]
            return token.encode() if None in letters else bytes(letters)  # type: ignore[arg-type]
        if self._byte_fallback and (byte := BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for old, new in self._replaced:
            token = token.replace(old, new)
        return token.encode()

    def _learn(self, decoder: dict[str, Any]) -> None:
        match decoder:
            case {"type": "Sequence", "decoders": list(parts)}:
                for part in parts:
                    self._learn(part)
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
                raise FormatError(f"The tokenizer has a decoder that cannot be followed token by token: {shown}")
